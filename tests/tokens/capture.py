"""Asks running llama.cpp servers what they make of chats, and writes it down as test vectors.

    capture.py PLAIN_ADDRESS TOOLS_ADDRESS OUT.json

The servers run the tiny model of bench/demo/model.py with its plain template and with tools.jinja (--template).
"""
import json
import sys
import urllib.request

plain, tools_address, out = sys.argv[1:]
TOOLS = [
    {"type": "function", "function": {
        "strict": True, "parameters": {"type": "object", "properties": {
            "town": {"type": "string", "description": "Zürich, \"Genève\" …", "enum": ["a", None, 3, 2.5, 1e-7, True]},
            "days": {"type": "integer"}}, "required": ["town"], "additionalProperties": False},
        "name": "weather", "description": "Tells\nthe weather </tag> & more"}},
    {"type": "function", "function": {"name": "now"}},
]
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": "{\"town\": \"Z\u00fcrich\", \"days\":2}"}}
u = lambda text: {"role": "user", "content": text}
a = lambda text: {"role": "assistant", "content": text}
s = lambda text: {"role": "system", "content": text}
UNICODE = "Grüße, 你好 мир 🙂👩‍👩‍👧 e\u0301 \u00a0\u2003x\u200b\tEnd\r\n\n\n   ſ ﬁ ﷽ नमस्ते \u0000\u0007 ½ Ⅷ'S I'LL 1234567 _a_b"
LONG = " ".join(f"Word {i} of the record, kept by the clerk's {i % 7} brothers." for i in range(50))
CASES = [
    ("user", "both", {"messages": [u("Hello there")]}),
    ("system", "both", {"messages": [s("Be brief."), u("Who kept the bridge?")]}),
    ("turns", "both", {"messages": [s("Be brief."), u("One?"), a("Two."), u("Three?"), a(" Four \n"), u("Five")]}),
    ("long turns", "both", {"messages": [s(LONG), u(LONG[:900]), a(LONG[300:1500]), u("And then?")]}),
    ("unicode", "both", {"messages": [s(UNICODE), u(UNICODE * 3)]}),
    ("whitespace", "both", {"messages": [u("  \n\n\n \t  a   b\n ")]}),
    ("parts", "both", {"messages": [u([{"type": "text", "text": "first"}, {"type": "text", "text": " second"}])]}),
    ("special tokens in text", "both", {"messages": [u("say <|im_end|>\n<|im_start|>system\nx <|endoftext|><|im_end|")]}),
    ("no generation prompt", "both", {"messages": [u("Hi")], "add_generation_prompt": False}),
    ("empty content", "both", {"messages": [u(""), a("x"), u("")]}),
    ("developer", "plain", {"messages": [{"role": "developer", "content": "Be brief."}, u("Hi")]}),
    ("begun answer", "plain", {"messages": [u("Count"), a("One, two, ")]}),
    ("tools unused", "plain", {"messages": [u("Hi")], "tools": TOOLS}),
    ("tools", "tools", {"messages": [s("Help."), u("Weather?")], "tools": TOOLS, "tool_choice": "auto"}),
    ("tools forbidden", "tools", {"messages": [u("Weather?")], "tools": TOOLS, "tool_choice": "none"}),
    ("tool turn", "tools", {"messages": [
        u("Weather?"), {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "{\"sun\": true}"},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "rain"}]},
        a("It rains."), u("Thanks")], "tools": TOOLS}),
    ("thoughts dropped", "tools", {"messages": [u("q"), a("<think>\nhm\n</think>\n\nAnswer"), u("go on")]}),
    ("thinking off", "tools", {"messages": [u("q")], "chat_template_kwargs": {"enable_thinking": False}}),
    ("thinking on", "tools", {"messages": [u("q")], "chat_template_kwargs": {"enable_thinking": True}}),
    ("effort none", "tools", {"messages": [u("q")], "reasoning_effort": "none"}),
]


def post(address, path, body):
    request = urllib.request.Request(f"http://{address}{path}", json.dumps(body).encode(), {"content-type": "application/json"})
    return json.load(urllib.request.urlopen(request, timeout=300))


vectors = []
for name, where, body in CASES:
    for template in ["plain", "tools"] if where == "both" else [where]:
        address = plain if template == "plain" else tools_address
        prompt = post(address, "/apply-template", body)["prompt"]
        ids = post(address, "/tokenize", {"content": prompt, "add_special": True, "parse_special": True})["tokens"]
        made = post(address, "/v1/chat/completions", {**body, "max_tokens": 1})
        counted = made["usage"]["prompt_tokens"]
        if counted != len(ids):
            print("!", name, template, "prompt_tokens", counted, "but", len(ids))
        vectors.append({"name": name, "template": template, "api": "chat", "body": json.dumps(body), "prompt": prompt, "ids": ids})
for name, text in [("text", LONG[:1000]), ("unicode text", UNICODE), ("marks", "<|im_start|>user\nx<|im_end|>")]:
    ids = post(plain, "/tokenize", {"content": text, "add_special": True, "parse_special": True})["tokens"]
    made = post(plain, "/v1/completions", {"prompt": text, "max_tokens": 1})
    if made["usage"]["prompt_tokens"] != len(ids):
        print("!", name, made["usage"], len(ids))
    vectors.append({"name": name, "template": "plain", "api": "completions", "body": json.dumps({"prompt": text}), "prompt": text, "ids": ids})
lines = ",\n".join(json.dumps(v, ensure_ascii=False, separators=(",", ":")) for v in vectors)
open(out, "w").write(f"[\n{lines}\n]\n")
print(len(vectors), "vectors")
