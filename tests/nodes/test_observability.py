"""What both nodes say of themselves, as real processes: JSON logs without a prompt, metrics as documented."""

from __future__ import annotations

import http.client
import json
import re
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from muser_wire.cli.nodes import Node, pause

ROOT = Path(__file__).resolve().parent.parent.parent
START_S = 90.0
ANSWER_S = 60.0
WORDS = ("heliotrope", "quagmire", "zephyrine")
"""What the test asks about; no log may have them."""

PROMPT = " ".join(WORDS) * 12
CHUNK_TOKENS = 64


@dataclass
class Nodes:
    """A producer and a decode node that ran through one test of everything, and their ports."""

    prefill: Node
    decode: Node
    answers: list[dict[str, Any]]

    def metrics(self, node: str) -> str:
        port = self.decode.ports["port"] if node == "decode" else self.prefill.ports["metrics_port"]
        status, headers, body = get(port, "/metrics")
        assert (status, headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
        return body


def get(port: int, path: str) -> tuple[int, dict[str, str], str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_S)
    connection.request("GET", path)
    response = connection.getresponse()
    answer = response.status, {name.lower(): text for name, text in response.getheaders()}, response.read().decode()
    connection.close()
    return answer


def post(port: int, body: bytes) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_S)
    connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    answer = response.status, response.read()
    connection.close()
    return answer


def chat(port: int, content: str, **fields: Any) -> dict[str, Any]:
    message = {"role": "user", "content": content}
    payload = {"model": "muser", "messages": [message], "temperature": 0, "max_tokens": 8, **fields}
    status, body = post(port, json.dumps(payload).encode())
    assert status == 200, body
    return dict(json.loads(body))


def start(module: str, model: Path, folder: Path, *flags: str) -> Node:
    numerics = ["--dtype", "f32", "--kv", "f16", "--threads", "1", "--chunk-tokens", str(CHUNK_TOKENS)]
    logs = ["--log-format", "json", "--log-level", "debug", "--drain-s", "5"]
    command = [sys.executable, "-m", module, "serve", "--model", str(model), *numerics, *logs, *flags]
    node = Node(module, command, folder, piped=False)
    node.wait_ready(START_S, pause)
    return node


@pytest.fixture(scope="module")
def nodes(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """Both nodes, after chats of every kind: remote, warm, local, streamed, refused."""
    folder = tmp_path_factory.mktemp("observed")
    started: list[Node] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MUSER_HOME", str(folder / "home"))
        try:
            ports = ["--control-port", "0", "--data-port", "0", "--metrics-port", "0"]
            started.append(start("muser_prefill", tiny_llama, folder, *ports))
            producer = f"127.0.0.1:{started[0].ports['control_port']}"
            flags = ["--port", "0", "--producer", producer, "--route", "remote", "--cache-disk-mb", "64"]
            started.append(start("muser_decode", tiny_llama, folder, *flags))
            port = started[1].ports["port"]
            answers = [chat(port, PROMPT), chat(port, PROMPT), chat(port, WORDS[0])]
            answers += [chat(port, PROMPT + WORDS[1] * 30)]
            assert post(port, json.dumps({"model": "muser", "messages": WORDS}).encode())[0] == 400
            assert post(port, f'{{"model": "muser", "messages": [{WORDS[2]}'.encode())[0] == 400
            streamed = {
                "messages": [{"role": "user", "content": PROMPT}],
                "model": "muser",
                "stream": True,
                "max_tokens": 4,
            }
            assert post(port, json.dumps(streamed).encode())[0] == 200
            yield Nodes(*started, answers)
        finally:
            for node in started:
                node.kill()


def lines_of(node: Node) -> list[dict[str, Any]]:
    """Every line of a node's log; one that is no JSON object fails the test."""
    lines = [json.loads(text) for text in node.log_file.read_text().splitlines()]
    assert lines
    for line in lines:
        assert {"ts", "level", "logger", "event"} <= set(line)
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["ts"])
    return lines


def named(node: Node, event: str) -> list[dict[str, Any]]:
    return [line for line in lines_of(node) if line["event"] == event]


def test_each_line_of_both_logs_is_json_and_none_has_a_prompt(nodes: Nodes) -> None:
    said = {str(answer["choices"][0]["message"]["content"]).strip() for answer in nodes.answers}
    for node in (nodes.prefill, nodes.decode):
        lines_of(node)
        log = node.log_file.read_text().lower()
        assert not [word for word in WORDS if word in log]
        # Nor an answer, as far as it is more than a letter or two.
        assert not [text for text in said if len(text) > 3 and json.dumps(text)[1:-1].lower() in log]


def test_events_have_fields_with_types(nodes: Nodes) -> None:
    routed = named(nodes.decode, "routed")
    assert len(routed) == 5
    first = routed[0]
    assert (first["route"], first["code"], first["reason"]) == ("remote", "none", None)
    assert first["remote_tokens"] == nodes.answers[0]["muser"]["remote_tokens"] > 0
    assert isinstance(first["prefill_s"], float)
    # The same handoff, by the same id, in both logs.
    ended = {line["handoff"]: line["state"] for line in named(nodes.prefill, "handoff_ended")}
    assert ended[first["handoff"]] == "sealed"
    assert {line["logger"].partition(".")[0] for line in lines_of(nodes.decode)} >= {"muser_decode", "uvicorn"}
    assert named(nodes.decode, "serving")[0]["url"] == f"http://127.0.0.1:{nodes.decode.ports['port']}"


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = text_string_to_metric_families(text)
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def total(text: str, name: str, **labels: str) -> float:
    """The sum of a metric's samples that have these labels."""
    return sum(
        value
        for (sample, pairs), value in samples(text).items()
        if sample == name and labels.items() <= dict(pairs).items()
    )


def test_the_decode_node_counts_what_its_answers_say(nodes: Nodes) -> None:
    text = nodes.metrics("decode")
    accounts = [answer["muser"] for answer in nodes.answers]
    streamed = 1
    assert total(text, "muser_requests_total") == len(accounts) + streamed
    assert total(text, "muser_requests_total", route="local", reason="short_prompt") == 1
    for origin, field in (("memory", "memory_tokens"), ("disk", "disk_tokens")):
        assert total(text, "muser_prompt_tokens_total", origin=origin) >= sum(each[field] for each in accounts)
    remote = sum(each["remote_tokens"] - each["peer_tokens"] for each in accounts)
    assert total(text, "muser_prompt_tokens_total", origin="remote_computed") == remote > 0
    assert total(text, "muser_prompt_tokens_total", origin="local_computed") == sum(
        each["local_tokens"] for each in accounts
    )
    assert total(text, "muser_segments_verified_total") == sum(each["segments_verified"] for each in accounts)
    assert total(text, "muser_handoff_bytes_total") == sum(each["payload_bytes"] for each in accounts)
    assert total(text, "muser_cache_prompts_total", result="hit") >= 1
    assert total(text, "muser_cache_prompts_total", result="miss") >= 1
    assert total(text, "muser_time_to_first_token_seconds_count") == len(accounts) + streamed
    assert total(text, "muser_producer_ready") == 1
    assert total(text, "muser_requests_active") == total(text, "muser_requests_waiting") == 0


def test_the_producer_counts_the_same_handoffs(nodes: Nodes) -> None:
    consumer, producer = nodes.metrics("decode"), nodes.metrics("prefill")
    assert total(producer, "muser_handoffs_total", ending="sealed") == total(
        consumer, "muser_handoffs_total", ending="sealed"
    )
    assert total(producer, "muser_handoff_bytes_total") == total(consumer, "muser_handoff_bytes_total")
    assert total(producer, "muser_segments_sent_total") == total(consumer, "muser_segments_verified_total")
    assert total(producer, "muser_handoffs_accepted_total") == total(producer, "muser_handoffs_total")
    for name in ("spec_digest", "weights_digest", "tokenizer_digest", "numerics_digest", "chunk_tokens"):
        (ours,), (theirs,) = (
            [dict(labels)[name] for (sample, labels) in samples(text) if sample == "muser_build_info"]
            for text in (consumer, producer)
        )
        assert ours == theirs
    assert total(producer, "muser_kernel_admitted") >= 0


def exposed(text: str) -> dict[str, str]:
    """Type by name; when a counter was made is no metric of its own."""
    types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    return {name: kind for name, kind in types.items() if not name.endswith("_created")}


def documented(heading: str) -> dict[str, str]:
    """Type by name, of the table in docs/operations.md below the line that begins with `heading`."""
    text = (ROOT / "docs" / "operations.md").read_text()
    table = text[text.index(f"\n{heading}") :].split("\n\n")[1]
    return dict(re.findall(r"^\| `(muser_\w+)` \| (\w+) \|", table, re.MULTILINE))


@pytest.mark.parametrize(("node", "heading"), [("decode", "Of the decode node:"), ("prefill", "Of the producer:")])
def test_the_documented_metrics_are_the_exposed_ones(nodes: Nodes, node: str, heading: str) -> None:
    there, said = exposed(nodes.metrics(node)), documented(heading)
    assert len(said) > 15
    if sys.platform != "linux":
        said.pop("muser_process_resident_bytes")
    assert there == said


def test_every_label_that_is_used_is_documented(nodes: Nodes) -> None:
    rows = (ROOT / "docs" / "operations.md").read_text().splitlines()
    for node, heading in (("decode", "Of the decode node:"), ("prefill", "Of the producer:")):
        at = rows.index(heading)
        said: dict[str, set[str]] = {}
        for row in rows[at + 2 :]:
            if not row.startswith("|"):
                break
            cells = [cell.strip() for cell in row.split("|")]
            said[cells[1].strip("`")] = set(re.findall(r"`(\w+)`", cells[3])) if cells[3] != "as above" else set()
        for name, pairs in samples(nodes.metrics(node)):
            family = re.sub(r"_(bucket|sum|count)$", "", name)
            if name.endswith("_created") or name == "muser_build_info":
                continue
            assert {label for label, _ in pairs} - {"le"} == said[family], name


def test_every_expression_of_the_dashboard_names_a_metric_that_exists(nodes: Nodes) -> None:
    kinds = {**exposed(nodes.metrics("prefill")), **exposed(nodes.metrics("decode"))}
    series = set(kinds)
    for name in (name for name, kind in kinds.items() if kind == "histogram"):
        series |= {f"{name}_bucket", f"{name}_sum", f"{name}_count"}
    dashboard = json.loads((ROOT / "deploy" / "grafana" / "muser.json").read_text())
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    expressions += [each["query"]["query"] for each in dashboard["templating"]["list"] if each["type"] == "query"]
    assert len(expressions) > 20
    for expression in expressions:
        named_here = set(re.findall(r"\bmuser_\w+", expression))
        assert named_here, expression
        assert named_here <= series, named_here - series
        for name in named_here:
            # A counter is read as a rate, a gauge as it is, a histogram by its buckets.
            is_rate = f"rate({name}" in expression
            assert is_rate == (name.endswith(("_total", "_bucket"))), expression
        labels = set(re.findall(r"by \(([^)]*)\)", expression))
        assert all(re.fullmatch(r"[a-z_]+(, [a-z_]+)*", each) for each in labels)
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in dashboard["panels"]]
    assert len(set(places)) == len(places)
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_the_logs_stay_json_to_the_end(nodes: Nodes) -> None:
    """The last test of this file: both nodes end, and a producer that is killed is told of in the same way."""
    nodes.prefill.process.send_signal(signal.SIGKILL)
    nodes.prefill.process.wait()
    deadline = time.monotonic() + ANSWER_S
    while not [line for line in named(nodes.decode, "producer") if line["state"] == "unreachable"]:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert chat(nodes.decode.ports["port"], WORDS[1] * 40)["muser"]["route"] == "local"
    assert nodes.decode.stop() == 0
    for node in (nodes.prefill, nodes.decode):
        lines_of(node)
        assert not [word for word in WORDS if word in node.log_file.read_text().lower()]
    assert named(nodes.decode, "stopped")
