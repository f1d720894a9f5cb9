"""Live survivors: replicas that go on without one that is lost, and give it their state when it is back.

Every replica is a world of its own: its mesh, its groups and its model know of no other. What replicas tell each other
goes through one more group for each place inside a replica (train/replica_group.py), made anew in every generation
(runtime/generations.py). A step is finished by whoever is left: gradients that a rank has computed stay, the
parts of the batch of those who are missing are computed by others, and nobody moves its weights before all parts are
summed. Whoever failed to hear the sum that others have heard is one step behind, and is given their state: so a
failure in the middle of an exchange needs no vote of its own. As in torchft, replicas are independent between two
exchanges; unlike there, no sample is left out.
"""

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.checkpoint.copies import Stall
from meshwright.config.run import Run
from meshwright.data.loader import Loader, StepBatch
from meshwright.data.prepare import Corpus
from meshwright.optim import clip
from meshwright.parallel import deterministic, precision
from meshwright.parallel.device import moment
from meshwright.parallel.mesh import Mesh, local
from meshwright.runtime import generations
from meshwright.runtime.failure import AGAIN, Exit, Failure, FailureError
from meshwright.runtime.generations import Generation, RankPosition
from meshwright.runtime.place import Place, RankSpec
from meshwright.runtime.records import EventRecord
from meshwright.spec.problem import InputError, Problem
from meshwright.spec.units import plural
from meshwright.train.faults import compared
from meshwright.train.live_outer import CALLED, LiveOuterLoop
from meshwright.train.loop import EvalResult, Stop, held_sums, is_due
from meshwright.train.replica_group import ReplicaGroup
from meshwright.train.saving import DueSave, NoSave, Save, Vote, holdings, saving
from meshwright.train.state import MovedError, State
from meshwright.train.step import choose
from meshwright.train.world import StoppedError, facts

GIVEN_UP_SECONDS = 120.0  # without a generation after a group broke: then there is no supervisor
RECORD_SECONDS = 2.0  # in which a peer has written the record of a step that it has made
MOST_BREAKS = 5  # of groups in a row in which nobody was lost: then it is no accident
BUCKET = 1 << 24  # elements that are exchanged at a time
SAME_CLOCK = 1.0  # second by which the clocks of one machine may seem to differ
FAILED = 2.0**40  # in the number that carries wishes to stop, words on saves and CALLED, above all of these
NOTHING = RankPosition(step=-1, evaluated=False, leads=False)
Answer = TypeVar("Answer")


def inside(run: Run) -> Run:
    """The run of one replica by itself: its own samples in every step, and no other replica."""
    plan = msgspec.structs.replace(run.plan, replicate=1)
    return msgspec.structs.replace(run, plan=plan, batch=run.batch // run.plan.replicate)


def place_inside(run: Run, order: RankSpec) -> Place:
    """This rank among those of its replica, who meet apart from all others."""
    replica, inner = _whereabouts(run, order.place.rank)
    ranks = generations.replica_ranks(run.plan, run.faults.spares)[replica]
    store = Path(order.beats) / f"replica{replica}.{order.start}.store"
    return msgspec.structs.replace(order.place, rank=inner, world=len(ranks), store=str(store))


def _whereabouts(run: Run, rank: int) -> tuple[int, int]:
    """The replica of a rank, and its number in there."""
    ranks = generations.replica_ranks(run.plan, run.faults.spares)
    replica = next(number for number, each in enumerate(ranks) if rank in each)
    return replica, ranks[replica].index(rank)


@dataclass(frozen=True, slots=True)
class PartGradient:
    """What one part of the batch gives: that of a replica, whoever computes it."""

    loss: Tensor  # summed over the ranks of a replica
    buckets: list[Tensor]  # of this rank's gradients, in host memory


def owners(members: Sequence[int], parts: int) -> list[int]:
    """Which member computes each part of the batch: its own replica; else spares, then all who are there in turn."""
    missing = [part for part in range(parts) if part not in members]
    turn = [each for each in members if each >= parts]
    while len(turn) < len(missing):
        turn += members
    taken = dict(zip(missing, turn, strict=False))
    return [taken.get(part, part) for part in range(parts)]


class Survivors:
    """This rank's dealings with the other replicas."""

    def __init__(self, run: Run, order: RankSpec, mesh: Mesh, stop: Stop) -> None:
        self.run, self.mesh, self.stop = run, mesh, stop
        self.folder, self.rank, self.start = Path(order.shared), order.place.rank, order.start
        self.ranks = generations.replica_ranks(run.plan, run.faults.spares)
        self.replica, self.inner = _whereabouts(run, self.rank)
        self.first_part = min(self.replica, run.plan.replicate - 1)  # of the batch, that it computes first
        self.told = replace(mesh, rank=self.rank, world=run.plan.world)  # for records: this rank among all
        self.by_tree = clip.choose(run.plan) is deterministic.measured  # deterministic mode
        self.generation = Generation(number=0, members=(), starts=(0,) * len(self.ranks))
        self.newest = self.generation  # that has begun, though this rank may not have entered it
        self.facts = hashlib.sha256(msgspec.json.encode(sorted(facts(run).items()))).hexdigest()
        self.group = ReplicaGroup(self._is_bereft)
        self.leads = False
        self.evaluated = -1  # the step after which the last validation loss was taken
        self.equal_at = 0  # the step after which members were last seen to hold the same
        self.called = False  # somebody waits to be let in
        # Where replicas sync rarely: this one has done so, unless it is about to; and what it then has is its own.
        self.met, self.is_guest = True, False
        self.lost_seconds = 0.0  # of this step, until it went on
        self.breaks = 0  # of groups in a row, though nobody was lost
        self.why = ""  # the last one broke
        self.events: list[EventRecord] = []
        self.away: dict[int, tuple[int, float]] = {}  # replicas that are missing: since which step, since when
        # A peer's records: up to which step, and what it told meanwhile.
        self.adopt: Callable[[int, float], tuple[int, list[EventRecord]]] = lambda rank, ahead: (0, [])
        self.giver = self.rank  # whose state this rank was given last
        self.ahead = 0.0  # of this machine's monotonic clock, that of the giver's
        self.state: State
        self.parts: dict[int, Loader]

    def begin(self, state: State, corpus: Corpus) -> None:
        """Meet the other replicas: at the start as equals, later as one that has no state."""
        self.state = state
        state.live = self
        state.loader.close()  # that of a replica by itself
        shard = self.mesh.place["shard"]
        mine = Loader(corpus, self.run, self.first_part * self.run.plan.shard + shard, self.mesh.device, state.step)
        # What was restored counts in steps of a replica by itself, whose batch is smaller.
        mine.start_at(state.loader.shift + state.step * state.loader.run.batch, state.step)
        state.loader = mine
        self.parts = {self.first_part: mine}
        self.forward_backward = choose(self.run, state.chunks, self.mesh)
        self.measure_inside = clip.choose(self.run.plan)
        self.equal_at = state.step
        self.evaluated = -1 if state.step == self.run.steps else state.step  # the ending may be all that was missing
        self.intact = self.start == 0
        if self.start:
            generations.touch(generations.ready_file(self.folder, self.rank, self.start))
        with suppress(MovedError):
            self._regroup()
        while not self.met:  # it came while the others were about to sync
            with suppress(MovedError):
                self._be_guest()
        self.lost_seconds = 0.0  # of no step

    def _be_guest(self) -> None:
        """Take part in a sync to which this replica brings nothing, and in its record."""
        assert isinstance(self.state.outer, LiveOuterLoop)
        self.state.outer.sync(torch.zeros((), dtype=torch.float64), cast_in=0)
        deadline = time.monotonic() + RECORD_SECONDS
        while self._hear() < self.state.step and time.monotonic() < deadline:
            generations.pause()

    def _hear(self) -> int:
        """Take over the records of the peer that gave this rank its state, and who is away by them; the newest step."""
        step, events = self.adopt(self.giver, self.ahead)
        replicas = {ranks[0]: replica for replica, ranks in enumerate(self.ranks)}
        for event in events:
            if event.what == "lost" and event.rank is not None:
                self.away[replicas[event.rank]] = event.step, event.at
            elif event.what == "back" and event.rank is not None:
                self.away.pop(replicas[event.rank], None)
        return step

    def between(self) -> Iterator[EvalResult]:
        """After a step: the validation loss that is due, and then who waits is let in, if all have heard of it."""
        yield from self.evaluations()
        if self.called:
            with suppress(MovedError):
                self._regroup()
            yield from self.evaluations()

    def measure(
        self, chunks: Sequence[nn.Module], loss_sum: Tensor, mesh: Mesh, ballot: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradient of the whole batch, by whoever is left; else as `clip.measured`."""
        if not self.state.outer.calendar.is_plain(self.state.step + 1):  # replicas are apart
            return self.measure_inside(chunks, loss_sum, mesh, ballot + CALLED * self._is_called())
        device, done = mesh.device, {self.first_part: self._part(loss_sum)}
        while True:
            for part in self._mine():
                if part not in done:
                    done[part] = self._compute(part)
            ballot = ballot % CALLED + CALLED * self._is_called()
            began, failed, loss, votes = time.monotonic(), False, torch.zeros(()), torch.zeros(())
            try:
                loss, votes = self._exchange(done, ballot)
            except FailureError:
                raise
            except RuntimeError as error:
                failed, self.why = True, str(error)
            said = FAILED if failed else float(votes)
            _, square, total = self.measure_inside(chunks, torch.zeros((), device=device), mesh, said)
            said = float(total.item())
            if said < FAILED:
                self.called, self.breaks = said % FAILED >= CALLED, 0
                return loss.to(device), square, torch.tensor(said % CALLED, dtype=torch.float64)
            self._regroup(began)

    def evaluations(self) -> Iterator[EvalResult]:
        """The validation loss that is due after this step, unless it has been taken."""
        while is_due(self.run, self.state) and self.evaluated != self.state.step and not self.state.stopped:
            try:
                yield self._evaluate()
            except MovedError:
                continue

    def part(self) -> None:
        """Leave together: whoever is behind is helped first."""
        is_done = False
        while not is_done:
            with suppress(MovedError):
                is_done = self.attempt(lambda: self.group.gather(torch.zeros(1))) is not None

    def take_lost_seconds(self) -> float:
        """Those since this was last asked."""
        lost, self.lost_seconds = self.lost_seconds, 0.0
        return lost

    def take_events(self) -> list[EventRecord]:
        """Who was lost, and who is back, since this was last asked."""
        events, self.events = self.events, []
        return events

    def saving(self, run: Run, state: State, mesh: Mesh, folder: Path | None) -> AbstractContextManager[Save]:
        """What saves when it is due."""
        return lead_saving(self, run, state, mesh, folder)

    # -- Parts of the batch.

    def _owner(self, part: int) -> int:
        return owners(self.generation.members, self.run.plan.replicate)[part]

    def _mine(self) -> list[int]:
        return [part for part in range(self.run.plan.replicate) if self._owner(part) == self.replica]

    def _loader(self, part: int) -> Loader:
        if part not in self.parts:
            shard = self.run.plan.shard
            self.parts[part] = self.state.loader.of(part * shard + self.mesh.place["shard"])
        return self.parts[part]

    def _compute(self, part: int) -> PartGradient:
        self.state.optimizer.zero_grad()
        batch: StepBatch = self._loader(part).take(self.state.step)
        return self._part(self.forward_backward(batch.together, self.state.scale.value))

    def _part(self, loss_sum: Tensor) -> PartGradient:
        loss = deterministic.total(loss_sum.double().reshape(1), self.run.plan, self.mesh)
        return PartGradient(loss.cpu(), [_flat(bucket) for bucket in _buckets(self._gradients())])

    def _gradients(self) -> list[Tensor]:
        weights = chain.from_iterable(chunk.parameters() for chunk in self.state.chunks)
        return [local(weight.grad) for weight in weights if weight.grad is not None]

    # -- What members tell each other.

    def _exchange(self, done: dict[int, PartGradient], ballot: float) -> tuple[Tensor, Tensor]:
        """Sum losses, wishes and gradients over all parts; gradients are written where they were."""
        mine, parts = self._mine(), self.run.plan.replicate
        numbers = torch.zeros(parts + 3, dtype=torch.float64)
        for part in mine:
            numbers[part] = done[part].loss[0]
        numbers[parts:] = torch.tensor([ballot, *self._checksum()], dtype=torch.float64)
        rows = self.group.gather(numbers)
        self.compare(rows[:, parts + 1 :].tolist(), self.generation.members)
        losses = self._by_part(rows[:, :parts])
        whole = [self._sum(list(buckets)) for buckets in zip(*(done[part].buckets for part in mine), strict=True)]
        for bucket, flat in zip(_buckets(self._gradients()), whole, strict=True):
            pieces = flat.split([tensor.numel() for tensor in bucket])
            for tensor, piece in zip(bucket, pieces, strict=True):
                tensor.copy_(piece.view(tensor.shape))
        return self._over_parts(losses), rows[:, parts].sum()

    def _checksum(self) -> tuple[int, int]:
        """Of the weights and states that replicas hold alike, in halves that a double holds; zeros if none is due."""
        every, step = self.run.faults.compare_every, self.state.step
        if not every or not step or step % every:
            return 0, 0
        total = torch.stack([deterministic.bit_sum(tensor) for tensor in compared(self.state)]).sum().item()
        return divmod(int(total) % 2**64, 2**32)

    def compare(self, rows: list[list[float]], members: Sequence[int]) -> None:
        """Raise when members that should hold the same do not."""
        odd = [members[number] for number in deterministic.odd_ones(rows)]
        if all(row == rows[0] for row in rows):
            self.equal_at = self.state.step if any(rows[0]) else self.equal_at
            return
        report = Failure(
            kind="replicas",
            code=Exit.HARDWARE,
            what=f"replicas {' and '.join(map(str, odd))} differ: their weights or states are not the same numbers",
            where=f"rank {self.rank}, seen after step {self.state.step}",
            since=f"after step {self.equal_at}, when all were equal",
            cause="a bit changed in memory or arithmetic: suspect the devices of those ranks",
            remedy="take the device out, and run the same command again; checkpoints in doubt are set aside",
            good_until=self.equal_at,
            suspects=tuple(odd),
            rank=self.ranks[odd[0]][self.inner],
            step=self.state.step,
        )
        raise FailureError(report)

    def _by_part(self, rows: Tensor) -> Tensor:
        """Each part's numbers from the member that has them; rows are by member, then by part."""
        members = self.generation.members
        return torch.stack([rows[members.index(self._owner(part)), part] for part in range(rows.shape[1])])

    def _over_parts(self, each: Tensor) -> Tensor:
        return deterministic.tree_sum(each) if self.by_tree else each.sum(0)

    def _sum(self, mine: list[Tensor]) -> Tensor:
        """One bucket of gradients over all parts, of which some are this rank's."""
        if not self.by_tree:
            total = mine[0].clone()
            for other in mine[1:]:
                total += other
            return self.group.summed(total)
        return self._tree(mine) + 0.0  # as `deterministic.GradientSum` does, which no negative zero survives

    def _tree(self, mine: list[Tensor]) -> Tensor:
        """The same by the tree over all parts, whoever has them: cut among the members, summed there, joined again."""
        if self.group.wire is None:
            return deterministic.tree_sum(torch.stack(mine))
        members, parts = self.generation.members, self.run.plan.replicate
        length = mine[0].numel()
        share = -(-length // len(members))
        padded = torch.zeros(len(mine), len(members), share, dtype=mine[0].dtype)
        for row, each in zip(padded.view(len(mine), -1), mine, strict=True):
            row[:length] = each
        sent = padded.transpose(0, 1).contiguous().view(-1)  # to each member its share of every part of mine
        owners = [self._owner(part) for part in range(parts)]
        from_each = [share * owners.count(member) for member in members]
        to_each = [share * len(mine)] * len(members)
        received = self.group.exchanged(sent, from_each, to_each)
        # They come by member, and of each in the order of its parts.
        order = [part for member in members for part in range(parts) if owners[part] == member]
        by_part = received.view(parts, share)[torch.tensor([order.index(part) for part in range(parts)])]
        return self.group.gather(deterministic.tree_sum(by_part)).view(-1)[:length]

    def attempt(self, ask: Callable[[], Answer]) -> Answer | None:
        """Ask the other members; None if one of them was lost meanwhile, and a new generation has begun."""
        began, answer = time.monotonic(), None
        try:
            answer = ask()
        except RuntimeError as error:
            self.why = str(error)
        if self._all_inside(answer is not None):
            self.breaks = 0
            return answer
        self._regroup(began)
        return None

    def _all_inside(self, is_so: bool) -> bool:
        """Whether something is so on every rank of this replica."""
        flag = torch.tensor(float(is_so), device=self.mesh.device)
        if self.mesh.world > 1:
            dist.all_reduce(flag, dist.ReduceOp.MIN)
        return bool(flag.item())

    def _evaluate(self) -> EvalResult:
        """The loss over samples that are never trained on, each by whoever is there."""
        began, done, tokens, sums = moment(self.mesh.device), dict[int, Tensor](), 0, None
        while sums is None:
            rows = torch.zeros(self.run.plan.replicate, self.run.eval.batches, dtype=torch.float64)
            for part in self._mine():
                if part not in done:
                    held, tokens = held_sums(self.run, self.state, self.mesh, self._loader(part))
                    done[part] = deterministic.total(held, self.run.plan, self.mesh).cpu()
                rows[part] = done[part]
            sums = self.attempt(lambda rows=rows: self._over_parts(self._by_part(self.group.gather(rows))))
        self.evaluated = self.state.step
        ended, loss = moment(self.mesh.device), sums.sum() / tokens
        return EvalResult(
            step=self.state.step, loss=loss, tokens=tokens, seconds=ended.at - began.at, began=began, ended=ended
        )

    # -- Generations.

    def _regroup(self, began: float | None = None) -> None:
        """Go on with whoever is there. `began`: what broke; its time is lost.

        All ranks of a replica try the same generation, and all go on in it or none.
        """
        if began is not None:
            self._break()
        self.group.leave()  # who still waits for us in the old one fails, and comes here
        self.called = False
        entered, before, received = time.monotonic(), self.generation, False
        while True:
            self.generation = self._next()
            found, is_in = self._standings(), False
            if found is not None:
                try:
                    self._connect()
                    received = self._catch_up(found) or received
                    is_in = True
                except FailureError:
                    raise
                except RuntimeError as error:  # somebody else is lost, or was too slow
                    self.why = str(error)
            if self._all_inside(is_in):
                break
            if found is not None:
                self._break()
        now = time.monotonic()
        self.lost_seconds += now - (entered if began is None else began)
        self._note(before, now, [self.replica] if received else [])
        is_same = self.generation.starts == before.starts and not self.generation.lost_since(before)
        self.breaks = self.breaks if is_same else 0
        self._take_parts()
        if received:
            raise MovedError

    def _break(self) -> None:
        """Leave a group that is of no use, so that whoever waits in it fails too, and ask for another generation."""
        generations.touch(generations.broken_file(self.folder, self.generation.number))
        self.group.leave()
        self.breaks += 1
        if self.breaks > MOST_BREAKS:
            raise RuntimeError(
                f"the replicas' group broke {self.breaks} times in a row, and nobody was lost: {self.why}"
            )

    def _next(self) -> Generation:
        """The newest generation after the last, on every rank of this replica."""
        deadline, found = time.monotonic() + GIVEN_UP_SECONDS, None
        while self.inner == 0 and found is None:
            if self._is_called() and self._is_member(self.newest):
                found = self.newest
            elif self.start and not self.intact and self.stop.signalled:
                found = self.generation  # nothing to save
            elif self.intact and time.monotonic() > deadline:
                raise _left_alone("the replicas' group broke, and nobody began another")
            else:
                generations.pause()
        if self.mesh.world > 1:
            replicas = range(len(self.ranks))
            told = torch.zeros(1 + 2 * len(replicas), dtype=torch.int64, device=self.mesh.device)
            if found is not None:
                own = [found.number, *(each in found.members for each in replicas), *found.starts]
                told = torch.tensor(own, dtype=torch.int64, device=self.mesh.device)
            dist.broadcast(told, src=0)
            number, *rest = told.tolist()
            members, starts = rest[: len(replicas)], rest[len(replicas) :]
            there = tuple(each for each in replicas if members[each])
            found = Generation(number=number, members=there, starts=tuple(starts))
        assert found is not None
        if found.number == self.generation.number:
            raise StoppedError("stopped while the replica came back")
        return found

    def _standings(self) -> dict[int, RankPosition] | None:
        """How far each member has come; None if the generation is over before all have said so.

        A replica is as far as the last of its ranks, so that all its ranks are given a state or none.
        """
        number = self.generation.number
        evaluated = self.evaluated == self.state.step
        mine = RankPosition(step=self.state.step, evaluated=evaluated, leads=self.leads, met=self.met)
        mine = mine if self.intact else NOTHING
        clock = time.time() - time.monotonic()
        generations.stand(self.folder, number, self.rank, msgspec.structs.replace(mine, clock=clock, facts=self.facts))
        everyone = [rank for member in self.generation.members for rank in self.ranks[member]]
        while (found := generations.standings(self.folder, number, everyone)) is None:
            if self._is_called():
                return None
            generations.pause()
        self._agree(found)
        return {
            member: generations.together([found[rank] for rank in self.ranks[member]])
            for member in self.generation.members
        }

    def _agree(self, found: dict[int, RankPosition]) -> None:
        """Refuse to go on with other code, versions or run file than those who have the state."""
        others = {rank: each for rank, each in found.items() if each.step >= 0}
        odd = [rank for rank, each in others.items() if each.facts != self.facts]
        if odd and (not self.intact or len(others) == len(found)):
            what = f"rank {self.rank} and rank {odd[0]} have different code, versions or run files"
            raise InputError([Problem(what, "start every machine with the same code, environment and run file")])

    def _connect(self) -> None:
        """Meet this rank's peers: those that have its place in other replicas."""
        members = self.generation.members
        store = dist.FileStore(str(self.folder / f"group.{self.generation.number}"), -1)
        own = dist.PrefixStore(str(self.inner), store)
        self.group.connect(own, members.index(self.replica), len(members), self._is_called)

    def _catch_up(self, found: dict[int, RankPosition]) -> bool:
        """Have those who are behind given the state of one who is not; whether this rank was."""
        furthest = max(standing.position for standing in found.values())
        ahead = [member for member, standing in found.items() if standing.position == furthest]
        if furthest[0] < 0:
            raise _left_alone("no replica is left that has the state")
        leaders = [member for member, standing in found.items() if standing.leads] or ahead
        self.leads = leaders[0] == self.replica
        behind = [member for member in found if member not in ahead]
        if self.replica in behind:
            apart = found[ahead[0]].clock - (time.time() - time.monotonic())
            self.ahead = apart if abs(apart) > SAME_CLOCK else 0.0
            self._receive(ahead[0])
        elif self.replica == ahead[0]:
            for member in behind:
                self._send(member)
        return self.replica in behind

    def _send(self, member: int) -> None:
        """This rank's state to the one with its place in another replica."""
        state, to = self.state, self.generation.members.index(member)
        own = (state.step, self.met, self.evaluated, state.loader.shift, state.stopped, state.optimizer.count.item())
        head = torch.tensor([*own, state.scale.value.item(), state.scale.streak.item()], dtype=torch.float64)
        for tensor in (head, *self._held()):
            self.group.send(tensor.detach().cpu().contiguous(), to)

    def _receive(self, member: int) -> None:
        """The same from there."""
        state, source = self.state, self.generation.members.index(member)
        self.intact = False
        head = self.group.receive(torch.zeros(8, dtype=torch.float64), source)
        for tensor in self._held():
            tensor.detach().copy_(self.group.receive(torch.empty(tensor.shape, dtype=tensor.dtype), source))
        step, met, evaluated, shift, stopped, updates, scale, streak = head.tolist()
        self.met, self.is_guest = bool(met), not met
        precision.refresh(state.chunks)
        if isinstance(state.outer, LiveOuterLoop):
            state.outer.forget()
        state.step, self.evaluated, state.stopped = int(step), int(evaluated), bool(stopped)
        state.optimizer.count.fill_(updates)
        state.scale.value.fill_(scale)
        state.scale.streak.fill_(streak)
        state.loader.start_at(int(shift) + state.step * self.run.batch, state.step)
        self.intact, self.giver = True, self.ranks[member][self.inner]
        self._hear()

    def _held(self) -> list[Tensor]:
        """What a checkpoint would have of this rank's state, saved by whomever."""
        return [holding.tensor for holding in holdings(self.state, self.run, self.mesh)]

    def _is_called(self) -> bool:
        """Whether a newer generation has begun."""
        self.newest = generations.current(self.folder, self.newest.number) or self.newest
        return self.newest.number > self.generation.number

    def _is_member(self, told: Generation) -> bool:
        """Whether it is this start of the replica that is in it, and not another that has taken its place."""
        return self.replica in told.members and told.starts[self.replica] == self.start

    def _is_bereft(self) -> bool:
        """Whether a member is known to be gone: what is under way with it has no end. Newcomers wait for a step's."""
        return self._is_called() and bool(self.newest.lost_since(self.generation))

    def _take_parts(self) -> None:
        """Give back the parts of those who are there again; a spare begins with one of those who are missing."""
        mine = self._mine()
        if self.first_part not in mine:
            self.first_part = mine[0]
            self.state.loader = self._loader(self.first_part)
        for part in [part for part in self.parts if part not in mine]:
            self.parts.pop(part).close()

    def _note(self, before: Generation, now: float, own: list[int]) -> None:
        """Who was lost or came back, for the records; of those who come back themselves only their `own` replica."""
        after, step = self.generation, self.state.step
        for member in after.lost_since(before):
            self.away[member] = step, now
            text = f"replica {member} ({_named(self.ranks[member])}) was lost: {len(after.members)} of "
            text += f"{self.run.plan.replicate} go on, after {self.lost_seconds:.2f} s"
            self.events.append(self._event("lost", text, member))
        for member in after.back_since(before) if before.members else own:
            who, away = f"{member} ({_named(self.ranks[member])})", self.away.pop(member, None)
            if member >= self.run.plan.replicate:
                text = f"spare {who} has taken a place, with the state of a peer"
            elif away is None:
                text = f"replica {who} was lost and is back with the state of a peer"
            else:
                after_it = f"{now - away[1]:.1f} s and {plural(step - away[0], 'step')} after it was lost"
                text = f"replica {who} is back with the state of a peer, {after_it}"
            self.events.append(self._event("back", text, member))

    def _event(self, what: Any, text: str, member: int) -> EventRecord:
        return EventRecord(what=what, step=self.state.step, text=text, rank=self.ranks[member][0], at=time.monotonic())

    def close(self) -> None:
        """End what reads ahead."""
        self.group.leave()
        for loader in self.parts.values():
            loader.close()


def of(run: Run, order: RankSpec, mesh: Mesh, stop: Stop, state: State) -> Survivors | None:
    """This rank's dealings with the other replicas, where each can do without them; they are met later."""
    if not run.faults.live:
        return None
    live = Survivors(run, order, mesh, stop)
    if run.plan.has_outer_loop:
        state.outer = LiveOuterLoop(run, state, mesh, live)
    return live


def _named(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _left_alone(what: str) -> FailureError:
    """There is nobody to go on with: the supervisor starts all ranks again, from the newest checkpoint."""
    return FailureError(Failure(kind="killed", code=Exit.RESUMABLE, what=what, remedy=AGAIN))


def _buckets(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Tensors one after another, of one type and not too many elements together."""
    found: list[list[Tensor]] = []
    room = 0
    for tensor in tensors:
        if not found or tensor.numel() > room or tensor.dtype != found[-1][0].dtype:
            found.append([])
            room = BUCKET
        found[-1].append(tensor)
        room -= tensor.numel()
    return found


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors]).cpu()


class LeadSave:
    """Saves while this rank's replica leads; else nothing, but for its word on what others ask."""

    def __init__(self, live: Survivors, begin: Callable[[], Save]) -> None:
        self.live, self.begin = live, begin
        self.save: Save = NoSave()

    def _now(self) -> Save:
        if self.live.leads and isinstance(self.save, NoSave):
            self.save = self.begin()
        return self.save

    def vote(self, step: int) -> Vote:
        return self._now().vote(step)

    def hear(self, heard: Vote) -> None:
        self.save.hear(heard)

    def hold_update(self) -> Stall | None:
        return self.save.hold_update()

    def __call__(self, state: State) -> float:
        return self._now()(state)


@contextmanager
def lead_saving(live: Survivors, run: Run, state: State, mesh: Mesh, folder: Path | None) -> Iterator[Save]:
    """What saves when it is due, by the replica that leads: all of a state, since every replica has it."""
    with ExitStack() as stack:

        def begin() -> Save:
            save = stack.enter_context(saving(run, state, mesh, folder))
            if isinstance(save, DueSave) and live.generation.number > 1 and run.checkpoint.every:
                save.postponed = state.step  # the last leader may have taken one with it
            return save

        yield LeadSave(live, begin)
