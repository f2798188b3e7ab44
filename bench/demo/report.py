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
    whole["redirects"] = sum(r["redirects"] for r in rounds)
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
    return {"system": f"{platform.system()} {platform.release()} {platform.machine()}", "cpu": model, "cpus": os.cpu_count()}


def show(value, form, unit=""):
    return "-" if value is None else form.format(value) + unit


def table(policies):
    rows = [("policy", "requests", "errors", "hit rate", "TTFT p50", "TTFT p95", "moved", "busiest/avg")]
    for p in policies:
        rows.append((
            p["name"], str(p["requests"]), str(p["errors"]),
            show(p["followup_hit_rate"] and p["followup_hit_rate"] * 100, "{:.1f}", " %"),
            show(p["ttft_p50_ms"], "{:.0f}", " ms"), show(p["ttft_p95_ms"], "{:.0f}", " ms"),
            f"{p['redirects']} of {p['followups']}", show(p["imbalance"], "{:.2f}"),
        ))  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join([row[0].ljust(widths[0])] + [c.rjust(w) for c, w in zip(row[1:], widths[1:])]) for row in rows]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


# The chart. One row for each policy, one column for each number; a bar is the policy, a tick on it a
# round, so that how far two rounds lie apart is seen beside how far two policies do.
WIDTH, LEFT, GAP, RIGHT, TOP, ROW, BAR = 860, 140, 96, 84, 112, 46, 24
COLUMNS = (
    ("followup_hit_rate", "Cache hit rate of follow-up turns", "higher is better", "#2f6f9f", 100, "{:.1f} %"),
    ("ttft_p95_ms", "Time to first token, 95th percentile", "lower is better", "#c2702d", 1, "{:,.0f} ms"),
)


def chart(policies, subtitle):
    width = (WIDTH - LEFT - GAP - RIGHT) / 2
    height = TOP + ROW * len(policies) + 44
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        "font-family=\"system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif\" font-size=\"13\" fill=\"#24292f\">",
        f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#ffffff"/>',
        '<text x="24" y="34" font-size="18" font-weight="600">One workload, four ways to choose the engine</text>'
        if len(policies) == 4
        else '<text x="24" y="34" font-size="18" font-weight="600">One workload, different ways to choose the engine</text>',
        f'<text x="24" y="54" fill="#57606a" font-size="12">{escape(subtitle)}</text>',
    ]
    for row, p in enumerate(policies):
        y = TOP + row * ROW
        out.append(f'<text x="{LEFT - 14}" y="{y + BAR / 2 + 4.5}" text-anchor="end" font-weight="600">{escape(p["name"])}</text>')
    for column, (key, title, better, colour, factor, form) in enumerate(COLUMNS):
        x = LEFT + column * (width + GAP)
        values = [v[key] for p in policies for v in (p, *p["rounds"]) if v[key] is not None]
        most = 1.0 if factor == 100 else max(values, default=1) or 1
        out.append(f'<text x="{x}" y="{TOP - 26}" font-weight="600">{title}</text>')
        out.append(f'<text x="{x}" y="{TOP - 10}" fill="#57606a" font-size="12">{better}</text>')
        for row, p in enumerate(policies):
            y = TOP + row * ROW
            out.append(f'<rect x="{x}" y="{y}" width="{width:.1f}" height="{BAR}" rx="3" fill="#f1f3f5"/>')
            if p[key] is None:
                continue
            length = max(2.0, p[key] / most * width)
            out.append(f'<rect x="{x}" y="{y}" width="{length:.1f}" height="{BAR}" rx="3" fill="{colour}"/>')
            for r in p["rounds"]:
                if r[key] is not None and len(p["rounds"]) > 1:
                    tick = x + r[key] / most * width
                    out.append(f'<path d="M{tick:.1f} {y - 3}v{BAR + 6}" stroke="#24292f" stroke-width="1.5"/>')
            label = escape(form.format(p[key] * factor))
            out.append(f'<text x="{x + width + 8}" y="{y + BAR / 2 + 4.5}">{label}</text>')
    if any(len(p["rounds"]) > 1 for p in policies):
        out.append(f'<text x="{LEFT}" y="{height - 22}" fill="#57606a" font-size="12">Bar: all rounds together. Tick: one round.</text>')
    return "\n".join([*out, "</svg>", ""])
