"""What a demo found: the table for the terminal, report.json, and the chart report.svg."""

from __future__ import annotations

import os
import platform
from collections import Counter
from html import escape

LEGEND = """\
hit rate     share of the prompt tokens of follow-up turns that the engines had in their cache (their own count)
TTFT         from sending a turn to the first word of its answer, all turns
moved        follow-up turns that went to another engine than the turn before
busiest/avg  tokens computed (prompt tokens not cached, and answers) by the busiest engine, over the average"""


def percentile(values, share):
    """The smallest value that at least `share` of them do not exceed; None of nothing."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * share // 100) - 1)] if ordered else None


def rounded(value, digits=1):
    return None if value is None else round(value, digits)


def measure(turns, endpoints):
    """The numbers of one run."""
    good = [t for t in turns if not t.error]
    followups = [t for t in good if t.number > 0]
    prompt = sum(t.prompt_tokens for t in followups)
    computed = Counter({name: 0 for name in endpoints})
    for t in good:
        computed[t.endpoint] += t.prompt_tokens - t.cached_tokens + t.answer_tokens
    total = sum(computed.values())
    before, redirects = {}, 0
    for t in sorted(good, key=lambda t: t.number):
        redirects += before.get(t.chat, t.endpoint) != t.endpoint
        before[t.chat] = t.endpoint
    ttft = [t.ttft_ms for t in good]
    return {
        "requests": len(turns),
        "errors": len(turns) - len(good),
        "followups": len(followups),
        "followup_hit_rate": rounded(sum(t.cached_tokens for t in followups) / prompt if prompt else None, 4),
        "ttft_p50_ms": rounded(percentile(ttft, 50)),
        "ttft_p95_ms": rounded(percentile(ttft, 95)),
        "followup_ttft_p50_ms": rounded(percentile([t.ttft_ms for t in followups], 50)),
        "followup_ttft_p95_ms": rounded(percentile([t.ttft_ms for t in followups], 95)),
        "redirects": redirects,
        "imbalance": rounded(max(computed.values()) * len(computed) / total if total else None, 3),
        "requests_by_endpoint": dict(sorted(Counter(t.endpoint or "none" for t in turns).items())),
        "reasons": dict(Counter(t.reason or "none" for t in turns).most_common()),
    }


def pool(name, rounds, turns, endpoints):
    """One policy over its rounds: rates and times from all its turns together.

    Balance is the exception: what one round heaped on one engine, another must not even out.
    """
    whole = measure([turn for run in turns for turn in run], endpoints)
    balance = [r["imbalance"] for r in rounds if r["imbalance"] is not None]
    whole["imbalance"] = rounded(sum(balance) / len(balance) if balance else None, 3)
    return {"name": name, **whole, "rounds": rounds}


def machine():
    model = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as lines:
            model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model)
    except OSError:
        pass
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    return {"system": system, "cpu": model, "cpus": os.cpu_count()}


def show(value, form):
    return "-" if value is None else form.format(value)


def percent(share):
    return "-" if share is None else f"{share * 100:.1f} %"


def table(policies):
    rows = [("policy", "requests", "errors", "hit rate", "TTFT p50", "TTFT p95", "moved", "busiest/avg")]
    for p in policies:
        row = [p["name"], p["requests"], p["errors"], percent(p["followup_hit_rate"])]
        row += [show(p["ttft_p50_ms"], "{:,.0f} ms"), show(p["ttft_p95_ms"], "{:,.0f} ms")]
        row += [f"{p['redirects']} of {p['followups']}", show(p["imbalance"], "{:.2f}")]
        rows.append([str(cell) for cell in row])
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join([row[0].ljust(widths[0])] + [c.rjust(w) for c, w in zip(row[1:], widths[1:])]) for row in rows]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


# The chart. One row for each policy, one column for each number; a bar is the policy, a tick on it a
# round, so that how far two rounds lie apart is seen beside how far two policies do.
WIDTH, LEFT, GAP, RIGHT, TOP, ROW, BAR, FOOT = 860, 140, 96, 84, 112, 46, 24, 28
FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"
INK, GREY, PALE = "#24292f", "#57606a", "#f1f3f5"
COLUMNS = (
    ("followup_hit_rate", "Cache hit rate of follow-up turns", "higher is better", "#2f6f9f", percent),
    ("ttft_p95_ms", "Time to first token, 95th percentile", "lower is better", "#c2702d", "{:,.0f} ms".format),
)


def text(x, y, words, **attributes):
    shown = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in attributes.items())
    return f'<text x="{x:.1f}" y="{y:.1f}"{shown}>{escape(words)}</text>'


def box(x, y, width, height, radius, fill):
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height}" rx="{radius}" fill="{fill}"/>'


def chart(policies, subtitle):
    width = (WIDTH - LEFT - GAP - RIGHT) / 2
    ticked = len(policies[0]["rounds"]) > 1
    height = TOP + ROW * len(policies) + (FOOT if ticked else 0)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'font-family="{FONT}" font-size="13" fill="{INK}">',
        box(0, 0, WIDTH, height, 8, "#ffffff"),
        text(24, 34, "The same chats, the engine chosen in different ways", font_size=18, font_weight=600),
        text(24, 54, subtitle, font_size=12, fill=GREY),
    ]
    rows = [(TOP + ROW * row, policy) for row, policy in enumerate(policies)]
    for y, policy in rows:
        out.append(text(LEFT - 14, y + BAR / 2 + 4.5, policy["name"], text_anchor="end", font_weight=600))
    for column, (key, title, better, colour, form) in enumerate(COLUMNS):
        x = LEFT + column * (width + GAP)
        out.append(text(x, TOP - 26, title, font_weight=600))
        out.append(text(x, TOP - 10, better, font_size=12, fill=GREY))
        values = [of[key] for p in policies for of in (p, *p["rounds"]) if of[key] is not None]
        most = 1.0 if key.endswith("rate") else max(values, default=1.0)
        for y, policy in rows:
            out.append(box(x, y, width, BAR, 3, PALE))
            if policy[key] is None:
                continue
            out.append(box(x, y, max(2.0, policy[key] / most * width), BAR, 3, colour))
            out.append(text(x + width + 8, y + BAR / 2 + 4.5, form(policy[key])))
            if ticked:
                ticks = [x + r[key] / most * width for r in policy["rounds"] if r[key] is not None]
                out += [f'<path d="M{t:.1f} {y - 3}v{BAR + 6}" stroke="{INK}" stroke-width="1.5"/>' for t in ticks]
    if ticked:
        out.append(text(LEFT, height - 20, "Bar: all rounds together. Tick: one round.", font_size=12, fill=GREY))
    return "\n".join([*out, "</svg>", ""])
