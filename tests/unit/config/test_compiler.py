from meshwright.config.check import missing
from meshwright.spec.plan import Plan


def nowhere(name: str) -> None:
    return None


def test_a_machine_without_a_compiler_is_told_once_with_the_remedy():
    (problem,) = missing(Plan(microbatch=1, compile=True), nowhere)
    assert str(problem) == (
        "plan.compile needs a C++ compiler, and this machine has none; "
        "install one (apt-get install g++), or leave plan.compile out"
    )


def test_who_compiles_nothing_needs_none():
    assert not list(missing(Plan(microbatch=1), nowhere))


def test_any_compiler_will_do():
    assert not list(missing(Plan(microbatch=1, compile=True), {"clang++": "/usr/bin/clang++"}.get))
