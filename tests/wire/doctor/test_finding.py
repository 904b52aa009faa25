from __future__ import annotations

import json

from muser_wire.doctor.finding import Verdict, bad, json_text, ok, table_text, unknown, warn

ALL = [ok("a", "fine", n=1), warn("bb", "so so", "mend it"), bad("c", "broken", "stop"), unknown("d", "dark")]


def test_each_verdict_has_its_maker() -> None:
    assert [one.verdict for one in ALL] == [Verdict.OK, Verdict.WARN, Verdict.BAD, Verdict.UNKNOWN]


def test_for_people_what_to_do_stands_below() -> None:
    assert table_text(ALL[:2]).splitlines() == [
        "ok       a  fine",
        "warn     bb so so",
        "         -> mend it",
    ]
    assert table_text(ALL[:1], 4) == "ok       a    fine"
    assert table_text([]) == ""


def test_for_programs_numbers_stand_beside() -> None:
    rows = json.loads(json_text(ALL))["findings"]
    assert rows[0] == {"name": "a", "verdict": "ok", "value": "fine", "advice": "", "n": 1}
    assert rows[2]["advice"] == "stop"
