"""The arithmetic of the run against vLLM. Run by `make test`; it needs no engine."""

import sys
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "demo"))

import run
from chats import Turn
from steps import Failure


def turn(chat, number, phase=run.TOGETHER, cached=0, error=None):
    t = Turn(chat, number)
    t.phase, t.cached_tokens, t.error = phase, cached, error
    return t


def record(prompt, predicted, delivered, **more):
    outcome = {"prompt_tokens": prompt, "cached_tokens": delivered}
    return {"target": "vllm-0", "reason": "sticky", "prompt_tokens": prompt, "cached_tokens": predicted,
            "outcome": outcome, **more}  # fmt: skip


class Run(unittest.TestCase):
    def test_a_conversations_turns_have_its_records_in_their_order(self):
        turns = [turn("a", 0), turn("b", 0), turn("a", 1, cached=90)]
        rows = run.joined(turns, {"a": [record(100, 0, 0), record(200, 96, 90)], "b": [record(50, 0, 0)]})
        self.assertEqual([(r["conversation"], r["prompt"]) for r in rows], [("a", 100), ("b", 50), ("a", 200)])
        self.assertEqual((rows[2]["predicted"], rows[2]["delivered"], rows[2]["seen"]), (96, 90, 90))

    def test_a_record_too_many_or_too_few_is_an_error(self):
        one = [record(1, 0, 0)]
        for records in ({}, {"a": []}, {"a": one * 2}, {"a": one, "b": one}):
            with self.assertRaises(Failure):
                run.joined([turn("a", 0)], records)

    def test_what_was_promised_too_much_does_not_make_up_for_too_little(self):
        turns = [turn("a", n) for n in range(4)]
        records = [record(100, 64, 32), record(100, 0, 64), record(100, 32, 32), record(100, 64, None)]
        total = run.totals(run.joined(turns, {"a": records}))
        self.assertEqual((total["predicted"], total["delivered"]), (96, 128))
        self.assertEqual((total["exact"], total["within_a_block"]), (1, 2))
        self.assertEqual((total["too_many"], total["too_few"]), (32, 64))
        self.assertEqual(total["wrong_share"], 0.32)

    def test_only_where_an_engine_is_gone_may_requests_fail(self):
        rows = []
        for phase in run.ROUNDS:
            good, bad = turn(phase, 0, phase), turn(phase, 1, phase, error="503")
            rows += run.joined([good, bad], {phase: [record(100, 0, 0), {"outcome": {}}]})
        failed = [line for line in run.complaints(rows, guessed=False) if "503" in line]
        self.assertEqual(len(failed), len(run.ROUNDS) - len(run.MAY_FAIL))

    def test_wrong_predictions_and_a_client_who_saw_another_number_are_told(self):
        rows = [row for phase in run.ROUNDS for row in run.joined(
            [turn(phase, 0, phase, cached=90)], {phase: [record(100, 96, 90)]})]  # fmt: skip
        self.assertEqual(len(run.complaints(rows, guessed=False)), len(run.ROUNDS))
        self.assertEqual(run.complaints(rows, guessed=True), [])
        rows[0]["seen"] = 64
        self.assertEqual(len(run.complaints(rows, guessed=True)), 1)


if __name__ == "__main__":
    unittest.main()
