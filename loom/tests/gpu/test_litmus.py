"""Litmus tests of PTX's memory model: synchronization between blocks that orders their accesses, and that does not.

Each test is the program of a few threads, one per block, and says whether it has a data race. The rules are those of
"Memory Consistency Model" in the PTX manual: a release pattern synchronizes with an acquire pattern on the same
location that reads from it, if both are strong at a scope that includes the other thread. Accesses that nothing orders
race, unless both are strong at such a scope.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import pytest
from gpu.emulated import kinds, launch, words

PLACES = {name: 64 * number for number, name in enumerate("xyzfg")}  # one a line of 64 bytes
WAIT = re.compile(r"wait\(([^)]*)\);")


def assembled(threads: tuple[str, ...]) -> str:
    """Return a kernel whose block k runs `threads[k]` on its first lane; `wait(load, f, n)` loads f until it is n."""
    number = 0

    def waiting(match: re.Match[str]) -> str:
        nonlocal number
        number += 1
        load, location, value = (part.strip() for part in match[1].split(","))
        again = f"again{number}: {load} %r20, [{location}]"
        return f"{again}; setp.ne.b32 %p20, %r20, {value}; @%p20 bra again{number};"

    lines = ["mov.u32 %r1, %ctaid.x; setp.ne.b32 %p1, %r0, 0; @%p1 bra end;"]
    lines += [f"setp.eq.b32 %p2, %r1, {k}; @%p2 bra block{k};" for k in range(len(threads))]
    lines += [f"block{k}: {WAIT.sub(waiting, text)} bra end;" for k, text in enumerate(threads)]
    body = re.sub(r"\[([xyzfg])\]", lambda found: f"[%rd0+{PLACES[found[1]]}]", "\n".join([*lines, "end:"]))
    return re.sub(r"\b(ld|st)((?:\.\w+)*) ", r"\1\2.global.b32 ", body)


def races(*threads: str, cooperative: bool = False) -> bool:
    """Run the threads, each in a block of its own; return whether a race was found, and nothing else."""
    outcome = launch(assembled(threads), words(128), grid=(len(threads), 1, 1), cooperative=cooperative)
    reported = kinds(outcome)
    assert reported in ([], ["global memory race"])
    return bool(reported)


class Litmus(NamedTuple):
    races: bool
    threads: tuple[str, ...]


def passing(store: str, load: str) -> tuple[str, ...]:
    """Return a message-passing test: data in x, then a flag in f. `store` and `load` may begin or end with fences."""
    return f"st [x], 7; {store}", f"{load} ld %r2, [x];"


SET = "st{} [f], 1;"
SEEN = "wait(ld{}, f, 1);"
ADD = "atom{}.global.add.u32 %r3, [f], 1;"

MESSAGE_PASSING = {
    "weak": Litmus(True, passing(SET.format(""), "ld %r3, [f];")),
    "relaxed": Litmus(True, passing(SET.format(".relaxed.gpu"), SEEN.format(".relaxed.gpu"))),
    "volatile is relaxed": Litmus(True, passing(SET.format(".volatile"), SEEN.format(".volatile"))),
    "release alone": Litmus(True, passing(SET.format(".release.gpu"), SEEN.format(".relaxed.gpu"))),
    "acquire alone": Litmus(True, passing(SET.format(".relaxed.gpu"), SEEN.format(".acquire.gpu"))),
    "release and acquire": Litmus(False, passing(SET.format(".release.gpu"), SEEN.format(".acquire.gpu"))),
    "scopes gpu and sys": Litmus(False, passing(SET.format(".release.sys"), SEEN.format(".acquire.gpu"))),
    "release of scope cta": Litmus(True, passing(SET.format(".release.cta"), SEEN.format(".acquire.gpu"))),
    "acquire of scope cta": Litmus(True, passing(SET.format(".release.gpu"), SEEN.format(".acquire.cta"))),
    "acquire of another location": Litmus(
        True, passing(SET.format(".release.gpu"), SEEN.format(".relaxed.gpu") + "ld.acquire.gpu %r3, [g];")
    ),
    "data after the release": Litmus(
        True, ("st.release.gpu [f], 1; st [x], 7;", SEEN.format(".acquire.gpu") + "ld %r2, [x];")
    ),
    "data before the acquire": Litmus(
        True, ("st [x], 7; st.release.gpu [f], 1;", "ld %r2, [x];" + SEEN.format(".acquire.gpu"))
    ),
    "atomics": Litmus(False, passing(ADD.format(".release.gpu"), ADD.format(".acquire.gpu"))),
    "atomics, both orders": Litmus(False, passing(ADD.format(".acq_rel.gpu"), ADD.format(".acq_rel.gpu"))),
    "atomics without an order are relaxed": Litmus(True, passing(ADD.format(""), ADD.format(""))),
    "atomics of scope cta": Litmus(True, passing(ADD.format(".acq_rel.cta"), ADD.format(".acq_rel.cta"))),
    "red releases": Litmus(
        False, passing("red.release.gpu.global.add.u32 [f], 1;", SEEN.format(".acquire.gpu"))
    ),
    "a comparison that fails writes nothing": Litmus(
        True, passing("atom.release.gpu.global.cas.b32 %r3, [f], 9, 1;", ADD.format(".acquire.gpu"))
    ),
    "a comparison that succeeds": Litmus(
        False, passing("atom.release.gpu.global.cas.b32 %r3, [f], 0, 1;", ADD.format(".acquire.gpu"))
    ),
    "the reader releases, the writer acquires": Litmus(
        False, ("ld %r2, [x]; st.release.gpu [f], 1;", SEEN.format(".acquire.gpu") + "st [x], 7;")
    ),
    "the reader's release is relaxed": Litmus(
        True, ("ld %r2, [x]; st.relaxed.gpu [f], 1;", SEEN.format(".acquire.gpu") + "st [x], 7;")
    ),
}  # fmt: skip

FENCES = {
    **{
        f"{fence} on both sides": Litmus(
            narrow, passing(f"{fence}; st.relaxed.gpu [f], 1;", f"wait(ld.relaxed.gpu, f, 1); {fence};")
        )
        for fence, narrow in (
            ("fence.acq_rel.gpu", False), ("fence.acq_rel.sys", False), ("fence.sc.gpu", False), ("membar.gl", False),
            ("membar.sys", False), ("fence.acq_rel.cta", True), ("fence.sc.cta", True), ("membar.cta", True),
        )
    },
    "fences of one direction": Litmus(
        False,
        passing("fence.release.gpu; st.relaxed.gpu [f], 1;", "wait(ld.relaxed.gpu, f, 1); fence.acquire.gpu;"),
    ),
    "fences of the wrong direction": Litmus(
        True,
        passing("fence.acquire.gpu; st.relaxed.gpu [f], 1;", "wait(ld.relaxed.gpu, f, 1); fence.release.gpu;"),
    ),
    "a fence and an acquire": Litmus(
        False, passing("fence.acq_rel.gpu; st.relaxed.gpu [f], 1;", "wait(ld.acquire.gpu, f, 1);")
    ),
    "a release and a fence": Litmus(
        False, passing("st.release.gpu [f], 1;", "wait(ld.relaxed.gpu, f, 1); fence.acq_rel.gpu;")
    ),
    "volatile flags between fences": Litmus(
        False, passing("membar.gl; st.volatile [f], 1;", "wait(ld.volatile, f, 1); membar.gl;")
    ),
    "a fence after the flag": Litmus(
        True, passing("st.relaxed.gpu [f], 1; fence.acq_rel.gpu;", "wait(ld.acquire.gpu, f, 1);")
    ),
    "a fence before the flag is read": Litmus(
        True, passing("st.release.gpu [f], 1;", "fence.acq_rel.gpu; wait(ld.relaxed.gpu, f, 1);")
    ),
    "fences around a weak flag": Litmus(
        True, passing("fence.acq_rel.gpu; st [f], 1;", "ld %r3, [f]; fence.acq_rel.gpu;")
    ),
    "data between the fence and the flag": Litmus(
        True,
        (
            "fence.acq_rel.gpu; st [x], 7; st.relaxed.gpu [f], 1;",
            "wait(ld.relaxed.gpu, f, 1); fence.acq_rel.gpu; ld %r2, [x];",
        ),
    ),
}  # fmt: skip

CHAINS = {
    "an atomic operation continues a release": Litmus(
        False,
        ("st [x], 7; st.release.gpu [f], 1;", ADD.format(".relaxed.gpu"), "wait(ld.acquire.gpu, f, 2); ld %r2, [x];"),
    ),
    "a store ends it": Litmus(
        True,
        (
            "st [x], 7; st.release.gpu [f], 1;",
            "wait(ld.relaxed.gpu, f, 1); st.relaxed.gpu [f], 2;",
            "wait(ld.acquire.gpu, f, 2); ld %r2, [x];",
        ),
    ),
    "a later store of the same thread continues it": Litmus(
        False, ("st [x], 7; st.release.gpu [f], 1; st.relaxed.gpu [f], 2;", "wait(ld.acquire.gpu, f, 2); ld %r2, [x];")
    ),
    "a weak store ends it": Litmus(
        True, ("st [x], 7; st.release.gpu [f], 1; st [f], 2;", "ld.acquire.gpu %r3, [f]; ld %r2, [x];")
    ),
    "through a third thread": Litmus(
        False,
        (
            "st [x], 7; st.release.gpu [f], 1;",
            "wait(ld.acquire.gpu, f, 1); st.release.gpu [g], 1;",
            "wait(ld.acquire.gpu, g, 1); ld %r2, [x];",
        ),
    ),
    "through a third thread that does not acquire": Litmus(
        True,
        (
            "st [x], 7; st.release.gpu [f], 1;",
            "wait(ld.relaxed.gpu, f, 1); st.release.gpu [g], 1;",
            "wait(ld.acquire.gpu, g, 1); ld %r2, [x];",
        ),
    ),
    "several releases of one location": Litmus(
        False,
        (
            "st [x], 1; " + ADD.format(".release.gpu"),
            "st [y], 1; " + ADD.format(".release.gpu"),
            "wait(ld.acquire.gpu, f, 2); ld %r2, [x]; ld %r2, [y];",
        ),
    ),
    "one of several does not release": Litmus(
        True,
        (
            "st [x], 1; " + ADD.format(".relaxed.gpu"),
            "st [y], 1; " + ADD.format(".release.gpu"),
            "wait(ld.acquire.gpu, f, 2); ld %r2, [x]; ld %r2, [y];",
        ),
    ),
}  # fmt: skip


def buffering(first: str, second: str, fence: str = "") -> tuple[str, ...]:
    """Return a test of two threads, each with an operation on one location and then on the other."""
    return (
        f"{first.format('x')} {fence} {second.format('y')}",
        f"{first.format('y')} {fence} {second.format('x')}",
    )


def iriw(store: str, load: str, fence: str = "") -> tuple[str, ...]:
    """Return a test of independent reads of independent writes: two writers, two readers in opposite orders."""
    readers = [f"{load} %r2, [{one}]; {fence} {load} %r3, [{other}];" for one, other in ("xy", "yx")]
    return f"{store} [x], 1;", f"{store} [y], 1;", *readers


BUFFERING = {
    "store buffering, weak": Litmus(True, buffering("st [{}], 1;", "ld %r2, [{}];")),
    "store buffering, weak with fence.sc": Litmus(
        True, buffering("st [{}], 1;", "ld %r2, [{}];", "fence.sc.gpu;")
    ),
    "store buffering, release and acquire": Litmus(
        False, buffering("st.release.gpu [{}], 1;", "ld.acquire.gpu %r2, [{}];")
    ),
    "store buffering, relaxed with fence.sc": Litmus(
        False, buffering("st.relaxed.gpu [{}], 1;", "ld.relaxed.gpu %r2, [{}];", "fence.sc.gpu;")
    ),
    "store buffering, relaxed of scope cta": Litmus(
        True, buffering("st.relaxed.cta [{}], 1;", "ld.relaxed.cta %r2, [{}];")
    ),
    "load buffering, weak": Litmus(True, buffering("ld %r2, [{}];", "st [{}], 1;")),
    "load buffering, relaxed": Litmus(False, buffering("ld.relaxed.gpu %r2, [{}];", "st.relaxed.gpu [{}], 1;")),
    "load buffering, weak loads and strong stores": Litmus(
        True, buffering("ld %r2, [{}];", "st.release.gpu [{}], 1;")
    ),
    "load buffering, strong loads and weak stores": Litmus(
        True, buffering("ld.acquire.gpu %r2, [{}];", "st [{}], 1;")
    ),
    "IRIW, weak": Litmus(True, iriw("st", "ld")),
    "IRIW, weak readers": Litmus(True, iriw("st.release.gpu", "ld")),
    "IRIW, weak writers": Litmus(True, iriw("st", "ld.acquire.gpu", "fence.sc.gpu;")),
    "IRIW, relaxed": Litmus(False, iriw("st.relaxed.gpu", "ld.relaxed.gpu", "fence.sc.gpu;")),
    "IRIW, release and acquire": Litmus(False, iriw("st.release.sys", "ld.acquire.sys")),
    "IRIW, readers of scope cta": Litmus(True, iriw("st.relaxed.gpu", "ld.relaxed.cta")),
}  # fmt: skip


def tickets(add: str, before: str = "", after: str = "") -> tuple[str, ...]:
    """Return a test of three threads that store a part each and draw a ticket; the last one reads all parts."""
    last = f"setp.ne.b32 %p3, %r3, 2; @%p3 bra end; {after} ld %r4, [x]; ld %r5, [y]; ld %r6, [z];"
    return tuple(f"st [{part}], 1; {before} {add} {last}" for part in "xyz")


def locked(lock: str, unlock: str) -> tuple[str, ...]:
    """Return a test of two threads that add to x under a lock in f."""
    take = f"take{{}}: atom{lock}.global.cas.b32 %r3, [f], 0, 1; setp.ne.b32 %p3, %r3, 0; @%p3 bra take{{}};"
    text = f"{take} ld %r4, [x]; add.s32 %r4, %r4, 1; st [x], %r4; atom{unlock}.global.exch.b32 %r5, [f], 0;"
    return tuple(text.replace("take{}", f"take{k}") for k in range(2))


TICKETS_AND_LOCKS = {
    "tickets, relaxed": Litmus(True, tickets(ADD.format(".relaxed.gpu"))),
    "tickets, release alone": Litmus(True, tickets(ADD.format(".release.gpu"))),
    "tickets, acquire alone": Litmus(True, tickets(ADD.format(".acquire.gpu"))),
    "tickets, acq_rel": Litmus(False, tickets(ADD.format(".acq_rel.gpu"))),
    "tickets, acq_rel of scope sys": Litmus(False, tickets(ADD.format(".acq_rel.sys"))),
    "tickets, acq_rel of scope cta": Litmus(True, tickets(ADD.format(".acq_rel.cta"))),
    "tickets, relaxed between fences": Litmus(
        False, tickets(ADD.format(".relaxed.gpu"), "fence.acq_rel.gpu;", "fence.acq_rel.gpu;")
    ),
    "tickets, a fence before them alone": Litmus(True, tickets(ADD.format(""), "membar.gl;")),
    "tickets, release and then a fence": Litmus(False, tickets(ADD.format(".release.gpu"), after="fence.acquire.gpu;")),
    "tickets, and a store after them": Litmus(
        True, (*tickets(ADD.format(".acq_rel.gpu")), "ld.acquire.gpu %r3, [f]; st [x], 2;", "st [x], 3;")
    ),
    "a lock": Litmus(False, locked(".acquire.gpu", ".release.gpu")),
    "a lock that is not acquired": Litmus(True, locked(".relaxed.gpu", ".release.gpu")),
    "a lock that is not released": Litmus(True, locked(".acquire.gpu", ".relaxed.gpu")),
    "a lock of scope cta": Litmus(True, locked(".acquire.cta", ".release.cta")),
    "stores of the same value": Litmus(True, ("st [x], 5;", "st [x], 5;")),
    "strong stores of different values": Litmus(False, ("st.relaxed.gpu [x], 5;", "st.relaxed.gpu [x], 6;")),
    "a strong load and a weak store": Litmus(True, ("ld.acquire.gpu %r2, [x];", "st [x], 6;")),
    "a relaxed counter beside a race": Litmus(
        True, tuple(f"red.relaxed.gpu.global.add.u32 [f], 1; {text}" for text in ("st [x], 5;", "ld %r2, [x];"))
    ),
}  # fmt: skip

ALL = {**MESSAGE_PASSING, **FENCES, **CHAINS, **BUFFERING, **TICKETS_AND_LOCKS}


@pytest.mark.parametrize("name", list(ALL))
def test_litmus(name: str) -> None:
    litmus = ALL[name]
    assert races(*litmus.threads) == litmus.races


@pytest.mark.parametrize("name", ["relaxed", "release alone", "acquire alone", "release and acquire"])
def test_the_consumer_comes_first(name: str) -> None:
    """Blocks of a cooperative launch run at once: the first one waits for the second."""
    litmus = MESSAGE_PASSING[name]
    assert races(*reversed(litmus.threads), cooperative=True) == litmus.races


# ---- blocks of several warps -------------------------------------------------------------------------------------

PARTS = """
  mov.u32 %r1, %ctaid.x; mad.lo.s32 %r2, %r1, 64, %r0; mul.wide.u32 %rd1, %r2, 4; add.s64 %rd1, %rd1, %rd0;
  st.global.b32 [%rd1+256], %r0; {before}
  setp.eq.b32 %p1, %r0, 0; mov.b32 %r4, smem;
  @%p1 atom.acq_rel.gpu.global.add.u32 %r3, [%rd0], 1; @%p1 st.shared.b32 [%r4], %r3;
  {after} ld.shared.b32 %r3, [%r4]; setp.ne.b32 %p2, %r3, 1; @%p2 bra end;
  mul.wide.u32 %rd2, %r0, 4; add.s64 %rd2, %rd2, %rd0; ld.global.b32 %r5, [%rd2+256]; ld.global.b32 %r6, [%rd2+512];
  end:
"""


@pytest.mark.parametrize(
    ("before", "found"),
    [("bar.sync 0;", []), ("", ["global memory race"]), ("bar.warp.sync -1;", ["global memory race"])],
    ids=["a barrier", "no barrier", "a barrier of each warp"],
)
def test_a_release_publishes_what_a_barrier_made_known(before: str, found: list[str]) -> None:
    """All threads store, and the first draws the ticket: it releases the others' stores if a barrier came before."""
    body = PARTS.format(before=before, after="bar.sync 0;")
    assert kinds(launch(body, words(192), threads=64, grid=(2, 1, 1), shared=4)) == found


def test_threads_of_a_block_synchronize_by_global_memory() -> None:
    """Scope cta is enough for two warps of one block; relaxed is not."""
    body = """
      setp.ge.u32 %p1, %r0, 32; @%p1 bra other; setp.ne.b32 %p2, %r0, 0; @%p2 bra end;
      st.global.b32 [%rd0+64], 7; st.{release}.cta.global.b32 [%rd0], 1; bra end;
      other: setp.ne.b32 %p2, %r0, 32; @%p2 bra end;
      again: ld.{acquire}.cta.global.b32 %r2, [%rd0]; setp.ne.b32 %p3, %r2, 1; @%p3 bra again;
      ld.global.b32 %r3, [%rd0+64]; st.global.b32 [%rd0+96], %r3;
      end:
    """
    for release, acquire, found in (
        ("release", "acquire", []),
        ("relaxed", "acquire", ["global memory race"]),
    ):
        text = body.format(release=release, acquire=acquire)
        assert kinds(launch(text, words(32), threads=64)) == found
