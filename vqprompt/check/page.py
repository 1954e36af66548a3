"""The page about what is doubtful: thumbnails, most doubtful first, and what it is compared with beside it."""

from __future__ import annotations

from pathlib import Path

from vqprompt.check.check import Checked
from vqprompt.files import write_atomically
from vqprompt.report.pages import render
from vqprompt.report.thumbnails import thumbnail

MOST = 300  # findings with pictures


def write_page(found: Checked, target: Path, source: str) -> Path:
    items = [
        {"f": f, "picture": thumbnail(found.opened.get(f.where), f.where),
         "other": thumbnail(found.opened.get(f.other), f.other) if f.other else None}
        for f in found.findings[:MOST]
    ]  # fmt: skip
    page = render(PAGE, found=found, items=items, source=source, more=max(0, len(found.findings) - MOST))
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target, page)
    return target


def write_list(found: Checked, target: Path) -> Path:
    """The list that `vqprompt learn --exclude` takes."""
    reasons = {f.where: f"{f.kind}: {f.says}" for f in reversed(found.findings) if f.leave_out}
    lines = [
        "# Images that `vqprompt learn --exclude` leaves out, most doubtful first. Nothing was moved or deleted.",
        "# Take out the lines of images that are right.",
    ]
    for where in found.left_out:
        reason = " ".join(reasons[where].split())
        lines += ["", f"# {reason}", where]
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target, "\n".join(lines) + "\n")
    return target


PAGE = """{% extends "base" %}
{% block title %}Check of {{ source }}{% endblock %}
{% block head %}
<h1>Check <small>of {{ source }}</small></h1>
<ul class="facts"><li>{{ found.images }} images</li><li>{{ found.classes | length }} classes</li>
<li>{{ found.findings | length }} doubts</li><li>{{ found.seconds | duration }}</li></ul>
{% endblock %}
{% block main %}
<section>
<h2>What was found</h2>
{% if not found.findings and not found.alike and not found.few %}<p class="note">Nothing doubtful.</p>{% endif %}
<ul class="chips">{% for kind, count in found.counts().items() %}<li>{{ count }} × {{ kind }}</li>{% endfor %}</ul>
<p class="note">Nothing was moved or deleted. A doubt is not a verdict: look at the pictures.</p>
</section>
{% if items %}
<section class="long">
<h2>Images, most doubtful first</h2>
<div class="grid">
{% for item in items %}
<figure>
<div style="display:flex;gap:8px;align-items:flex-end;min-height:112px">
{% if item.picture %}<img src="{{ item.picture }}" alt="{{ item.f.where }}" loading="lazy">
{% else %}<span class="note">no picture</span>{% endif %}
{% if item.other %}<img src="{{ item.other }}" alt="{{ item.f.other }}" loading="lazy">{% endif %}
</div>
<figcaption><h3>{{ item.f.kind }} <span>· {{ item.f.label }}{% if item.f.likelier %} → {{ item.f.likelier }}?
{% endif %}</span></h3>
<p class="note">{{ item.f.says }}<br>{{ item.f.where }}</p></figcaption>
</figure>
{% endfor %}
</div>
{% if more %}<p class="note">{{ more }} more are in the list beside this page.</p>{% endif %}
</section>
{% endif %}
{% if found.alike %}
<section>
<h2>Classes that look alike</h2>
<p class="note">Their images are often taken for each other. More images of both help; or they are one class.</p>
<table class="list"><thead><tr><th>Class</th><th>Class</th><th class="n">Mixed up</th></tr></thead><tbody>
{% for one, other, share in found.alike[:100] %}
<tr><td>{{ one }}</td><td>{{ other }}</td><td class="n">{{ "%.0f" | format(100 * share) }} %</td></tr>
{% endfor %}
</tbody></table>
</section>
{% endif %}
{% if found.few %}
<section>
<h2>Classes with hardly any images</h2>
<ul class="chips">{% for name, count in found.few %}<li>{{ name }}: {{ count }}</li>{% endfor %}</ul>
</section>
{% endif %}
{% endblock %}
{% block foot %}Judged by frozen features; no image takes part in the judgement of itself.{% endblock %}
"""
