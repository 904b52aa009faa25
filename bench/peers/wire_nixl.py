"""NIXL over UCX, one side of it: the sink reads the source's registered memory. UCX is held to TCP."""

from __future__ import annotations

import base64
import os
from typing import Any

from lines import serve

# Between processes of one machine UCX would take shared memory, which no two machines have.
os.environ["UCX_TLS"] = "tcp"

from nixl import nixl_agent, nixl_agent_config
from wire_memory import MEMORY_NBYTES, cpu, digest, pieces, sink_memory, source_memory, timed

SIDE: dict[str, Any] = {}


def start(name: str, memory: Any) -> nixl_agent:
    agent = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
    agent.register_memory([(memory.ctypes.data, MEMORY_NBYTES, 0, "")], "DRAM")
    SIDE.update(agent=agent, memory=memory)
    return agent


def source() -> dict[str, Any]:
    metadata = start("source", source_memory()).get_agent_metadata()
    return {"address": [base64.b64encode(metadata).decode(), SIDE["memory"].ctypes.data]}


def sink(address: list[Any]) -> dict[str, Any]:
    name = start("sink", sink_memory()).add_remote_agent(base64.b64decode(address[0]))
    SIDE.update(peer=name, remote=address[1])
    return {}


def receive(nbytes: int) -> None:
    agent = SIDE["agent"]
    for at, size in pieces(nbytes):
        here = agent.get_xfer_descs([(SIDE["memory"].ctypes.data + at, size, 0)], "DRAM")
        there = agent.get_xfer_descs([(SIDE["remote"] + at, size, 0)], "DRAM")
        handle = agent.initialize_xfer("READ", here, there, SIDE["peer"])
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        agent.release_xfer_handle(handle)
        if state != "DONE":
            raise RuntimeError(f"the transfer ended as {state}")


def check(nbytes: int) -> dict[str, Any]:
    receive(nbytes)
    return digest(SIDE["memory"], nbytes)


if __name__ == "__main__":
    serve(
        {
            "source": source,
            "sink": sink,
            "check": check,
            "pull": lambda nbytes: timed(receive, nbytes),
            "digest": lambda nbytes: digest(SIDE["memory"], nbytes),
            "cpu": cpu,
        }
    )
