"""The demo's arithmetic, and that a seed gives the same chats. Run by `make test`."""

import unittest

import report
from chats import Chat, Turn


def turn(chat, number, endpoint, prompt, cached, error=None):
    t = Turn(chat, number)
    t.endpoint, t.prompt_tokens, t.cached_tokens, t.answer_tokens = endpoint, prompt, cached, 10
    t.ttft_ms, t.error = float(prompt - cached), error
    return t


class Demo(unittest.TestCase):
    def test_a_seed_gives_the_same_chats_and_another_seed_others(self):
        one, again, other = (Chat(seed, 3, (6, 8)) for seed in ("1.0", "1.0", "2.0"))
        self.assertEqual((one.questions, one.thinks), (again.questions, again.thinks))
        self.assertNotEqual(one.questions, other.questions)

    def test_percentiles_are_values_that_were_seen(self):
        self.assertEqual(report.percentile([4, 1, 3, 2], 50), 2)
        self.assertEqual(report.percentile([4, 1, 3, 2], 95), 4)
        self.assertIsNone(report.percentile([], 50))

    def test_first_turns_and_failures_are_no_hits(self):
        turns = [
            turn("a", 0, "llama-0", 100, 0),
            turn("a", 1, "llama-0", 200, 150),
            turn("b", 0, "llama-1", 100, 0),
            turn("b", 1, "llama-0", 200, 50),
            turn("b", 2, None, 0, 0, error="503"),
        ]
        numbers = report.measure(turns, ["llama-0", "llama-1"])
        self.assertEqual((numbers["requests"], numbers["errors"]), (5, 1))
        self.assertEqual(numbers["followup_hit_rate"], 0.5)
        self.assertEqual(numbers["redirects"], 1)
        # llama-0 computed 110 + 60 + 160 tokens, llama-1 110.
        self.assertAlmostEqual(numbers["imbalance"], 330 / 220, places=2)


if __name__ == "__main__":
    unittest.main()
