"""Faults: what is watched for while training, and when enough is enough. None of it changes the mathematics."""

import msgspec


class Faults(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of the supervisor and of the checks inside a run."""

    restarts: int = 3  # in a row that bring no newer checkpoint; those that do are free
    grace_seconds: float = 30.0  # from SIGTERM to the end of the save
    hang_seconds: float = 5.0  # the least stillness that can be a hang; learnt limits only raise it
    not_finite: int = 5  # steps in a row whose gradient is not finite
    spike: float = 12.0  # robust z-score of loss or gradient norm that is worth a warning; 0: never
    straggler: float = 1.3  # own work of a rank ÷ the others' that is worth a warning; 0: never
    compare_every: int = 100  # steps between comparisons of the replicas' weights; 0: never
