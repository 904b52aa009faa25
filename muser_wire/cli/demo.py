"""`muser demo`: one question answered by two nodes, and again after the producer was killed."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from muser_wire.cli.ask import Answer, AskFailed, Endpoint
from muser_wire.cli.nodes import NodeFailed, Pair, PairOptions, running_pair, termination_as_interrupt
from muser_wire.cli.progress import Meter
from muser_wire.cli.show import Wrapped, answers_table, bold, terminal_width
from muser_wire.errors import WireError
from muser_wire.home import muser_home
from muser_wire.model.fetch import fetch
from muser_wire.numerics import Lane

REMOTE = "remote"
LOCAL = "local"

BACKGROUND = """\
Two machines stand on a desk and share one job: answering questions about long texts. The first machine, called the \
reader, has a processor with a great deal of arithmetic. It can work through thousands of words at once, because \
every word of a text that is already there can be looked at in parallel. Its memory is slow, though, so when it has \
to produce one word after another it spends most of its time waiting. The second machine, called the writer, is the \
opposite. Its memory is three times as fast, and producing one word means reading the whole model from memory once, \
so the writer produces words quickly. But it has less arithmetic, and a long text keeps it busy for a while before \
the first word appears.

So they divide the job. The reader receives the text as a list of numbers and computes, for each layer of the \
model, what are called keys and values: a compact memory of everything that was read. As soon as one layer is \
finished, its keys and values travel over a cable to the writer, while the reader goes on with the next layer. The \
writer checks each parcel, puts it in its place, and refuses any parcel that is damaged, out of order, or meant for \
somebody else. When the last parcel is there, signed by the reader, the writer begins to produce the answer, word \
by word.

If the cable is pulled out, or the reader is switched off, nothing is lost but time. The writer keeps the parcels \
that were complete, reads the rest of the text by itself, and gives the same answer a little later.
"""

QUESTION = "Summarize this text in two sentences."

PROMPT = f"{BACKGROUND}\n{QUESTION}"


class DemoFailed(WireError):
    """The demo ran, and showed something that must not be."""

    code = "demo_failed"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare `muser demo`."""
    parser = commands.add_parser("demo", help="ask two nodes one question, kill the producer, ask again")
    add_pair_arguments(parser)
    parser.add_argument("--max-tokens", type=int, default=64, help="length of each answer, in tokens (default: 64)")
    parser.set_defaults(run=run)


def add_pair_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags that every command has which starts both nodes."""
    parser.add_argument("--model", default="smollm2", help="a name that `muser model fetch` takes, or a path")
    parser.add_argument("--start-timeout", type=float, default=180.0, help="seconds for each node to become ready")
    parser.add_argument(
        "--lane",
        choices=[lane.value for lane in Lane],
        default=Lane.NATIVE.value,
        help="arithmetic of both nodes: native in float32, or the same bytes on every machine (default: %(default)s)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the demo; return its exit status. Whatever happens, no process is left."""
    folder = Path(tempfile.mkdtemp(prefix="muser-demo-"))
    try:
        with termination_as_interrupt():
            model = fetch(arguments.model, muser_home(), Meter(sys.stderr))
            # The second answer would be warm if the first one were kept, and would show nothing of the fallback.
            options = PairOptions(
                model,
                folder,
                start_timeout_s=arguments.start_timeout,
                route=REMOTE,
                lane=Lane(arguments.lane),
                cache_memory_mb=0,
            )
            show(options, arguments.max_tokens)
    except KeyboardInterrupt:
        say("", "Interrupted; both nodes are stopped.")
        return 130
    except WireError as error:
        explain(error)
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


def show(options: PairOptions, max_tokens: int) -> None:
    """Start both nodes, ask twice, compare.

    Raises:
        WireError: a node failed, or an answer was not what it must be.
    """
    say(bold("Muser demo: one question, two nodes, on this machine's CPU"), f"Model: {options.model.name}", "")
    with running_pair(options) as pair:
        pair.start(lambda node: say(f"  {node.name:<8} node starts, pid {node.process.pid}"))
        say(f"  both are ready after {sum(node.ready_s for node in pair.nodes):.1f} s", "")
        first = first_answer(pair, max_tokens)
        second = second_answer(pair, max_tokens)
    compare(first, second)
    say_what_next()


def first_answer(pair: Pair, max_tokens: int) -> Answer:
    """Ask with both nodes running, and show how the answer came to be."""
    say(bold("1. The prefill node (torch) reads, the decode node (MLX) writes"))
    say(f"  A text about two machines, {len(BACKGROUND.split())} words, and then:")
    wrapped(QUESTION, indent="  > ")
    say("")
    answer = stream_answer(pair, max_tokens)
    say("", *answers_table(["both nodes"], [answer]), "")
    return answer


def second_answer(pair: Pair, max_tokens: int) -> Answer:
    """Kill the producer and ask the same."""
    pair.prefill.kill()
    say(bold("2. The prefill node is killed (SIGKILL), and the same is asked again"), "")
    answer = stream_answer(pair, max_tokens)
    say("")
    wrapped(f"The decode node says why it worked alone: {answer.reason or 'nothing'}")
    say("")
    return answer


def stream_answer(pair: Pair, max_tokens: int) -> Answer:
    """Ask the decode node and print the answer while it comes.

    Raises:
        NodeFailed: there was no answer; the node that ended is named, or else the decode node.
    """
    printer = Wrapped(sys.stdout, terminal_width())
    try:
        answer = Endpoint(pair.decode.ports["port"]).ask(PROMPT, max_tokens, printer.write)
    except AskFailed as error:
        printer.finish()
        raise NodeFailed("decode", f"gave no answer: {error}", pair.decode.log_tail()) from error
    printer.finish()
    return answer


def compare(first: Answer, second: Answer) -> None:
    """Print both answers' figures side by side, and check what the demo is there to show.

    Raises:
        DemoFailed: a route was not the expected one, or the two texts differ.
    """
    say(*answers_table(["both nodes", "prefill node killed"], [first, second]), "")
    if first.route != REMOTE:
        raise DemoFailed(f"the first answer's route was {first.route}, not {REMOTE}: {first.reason}")
    if second.route != LOCAL:
        raise DemoFailed(f"the second answer's route was {second.route}, not {LOCAL}")
    if not first.text:
        raise DemoFailed("the answers are empty")
    if first.text != second.text:
        raise DemoFailed("the two answers differ, which greedy decoding does not explain")
    say("  The two answers are equal, character for character.")
    wrapped("Both nodes share one CPU here, so the times only show that it works: neither way is meant to win.")
    say("")


def say_what_next() -> None:
    """Print the last lines: what is left, and what to try."""
    say(bold("Everything is stopped. Next: `make serve`, and in another terminal"))
    say(*curl_example("http://127.0.0.1:4949"))


def curl_example(url: str) -> list[str]:
    """Return the lines of a command that asks the endpoint something."""
    return [
        f"  curl -N {url}/v1/chat/completions \\",
        "    -H 'content-type: application/json' \\",
        """    -d '{"model": "muser", "stream": true, "messages": [""",
        """      {"role": "user", "content": "Why is the sky blue?"}]}'""",
    ]


def explain(error: WireError) -> None:
    """Print what failed, with the end of the failing node's log, on stderr."""
    sys.stdout.flush()
    if isinstance(error, NodeFailed) and error.log:
        say("", f"---- end of the {error.node} node's log", error.log, "----", err=True)
    say("", f"muser: {error}", err=True)


def wrapped(text: str, indent: str = "  ") -> None:
    """Print a paragraph, wrapped."""
    printer = Wrapped(sys.stdout, terminal_width(), indent)
    printer.write(text)
    printer.finish()


def say(*lines: str, err: bool = False) -> None:
    """Print lines at once, whoever reads the other end."""
    print(*lines, sep="\n", file=sys.stderr if err else sys.stdout, flush=True)
