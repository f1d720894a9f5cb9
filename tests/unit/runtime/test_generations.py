"""Who trains together, as the supervisor decides it."""

import msgspec

from meshwright.runtime import generations
from meshwright.runtime.generations import RankPosition, Roster, replica_ranks
from meshwright.spec.plan import Plan


def begun(folder, plan):
    roster = Roster(folder, plan)
    roster.begin()
    return roster


def test_the_ranks_of_a_replica_are_those_of_one_coordinate():
    assert replica_ranks(Plan(microbatch=1, replicate=2, shard=2)) == [[0, 1], [2, 3]]
    assert replica_ranks(Plan(microbatch=1, replicate=2, pp=2)) == [[0, 2], [1, 3]]
    assert replica_ranks(Plan(microbatch=1, replicate=2, tp=2, pp=2)) == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_who_is_lost_ends_a_generation_and_who_is_ready_begins_one(tmp_path):
    roster = begun(tmp_path, Plan(microbatch=1, replicate=3, shard=2))
    assert generations.current(tmp_path).members == (0, 1, 2)
    roster.lose({1}, trained={1})
    assert generations.current(tmp_path).members == (0, 2)
    generations.touch(generations.ready_file(tmp_path, 2, 1))
    assert roster.look(0.0, set()) == []  # one of its two ranks
    generations.touch(generations.ready_file(tmp_path, 3, 1))
    assert roster.look(0.0, set()) == [1]
    assert generations.current(tmp_path).members == (0, 1, 2)
    assert generations.current(tmp_path).number == 3


def test_a_replica_that_falls_before_it_trains_changes_nothing_for_the_others(tmp_path):
    roster = begun(tmp_path, Plan(microbatch=1, replicate=2))
    roster.lose({1}, trained={1})
    roster.lose({1}, trained=set())
    assert (roster.number, roster.fruitless[1], roster.starts[1]) == (2, 1, 2)
    generations.touch(generations.ready_file(tmp_path, 1, 1))  # of the first start, which is gone
    assert roster.look(0.0, set()) == []


def test_a_replica_that_falls_whenever_it_is_let_in_is_not_started_for_ever(tmp_path):
    roster = begun(tmp_path, Plan(microbatch=1, replicate=2))
    roster.lose({1}, trained={1})
    for start in (1, 2):
        generations.touch(generations.ready_file(tmp_path, 1, start))
        assert roster.look(0.0, set()) == [1]
        roster.lose({1}, trained=set())
    assert roster.fruitless[1] == 2


def test_a_replica_is_as_far_as_the_last_of_its_ranks_and_leads_with_all_of_them():
    one = RankPosition(step=3, evaluated=True, leads=True)
    behind = RankPosition(step=-1, evaluated=False, leads=True)
    assert generations.together([one, behind]) == behind
    assert not generations.together([one, msgspec.structs.replace(one, leads=False)]).leads


def test_a_group_that_broke_though_nobody_is_gone_is_made_again(tmp_path):
    roster = begun(tmp_path, Plan(microbatch=1, replicate=2))
    generations.touch(generations.broken_file(tmp_path, 1))
    roster.look(10.0, set())
    assert roster.number == 1
    roster.look(10.0 + 2 * generations.HICCUP_SECONDS, set())
    assert roster.number == 2
    assert roster.members == {0, 1}


def test_a_spare_takes_a_place_at_once_and_who_was_lost_is_the_next_spare(tmp_path):
    assert replica_ranks(Plan(microbatch=1, replicate=2, shard=2), 1) == [[0, 1], [2, 3], [4, 5]]
    roster = Roster(tmp_path, Plan(microbatch=1, replicate=2), spares=1)
    roster.begin()
    assert (roster.members, roster.starts) == ({0, 1}, [0, 0, 1])
    generations.touch(generations.ready_file(tmp_path, 2, 1))
    assert roster.look(0.0, set()) == []  # nobody needs it
    assert roster.number == 1
    roster.lose({0}, trained={0})
    assert generations.current(tmp_path).members == (1, 2)
    assert roster.number == 2  # and not 3: the others make their groups again once
    generations.touch(generations.ready_file(tmp_path, 0, 1))
    assert roster.look(0.0, set()) == []
    assert roster.idle == {0}
    roster.lose({1, 2}, trained={1, 2})
    assert (roster.members, roster.idle) == (set(), {0})  # which has no state to go on with


def test_what_is_condemned_has_no_place_and_a_spare_begins_in_it(tmp_path):
    roster = Roster(tmp_path, Plan(microbatch=1, replicate=2), spares=2, without={0})
    roster.begin()
    assert (roster.here, roster.members, roster.away) == ({1, 2, 3}, {1, 2}, {3})


def test_standings_are_known_once_all_have_spoken(tmp_path):
    own = RankPosition(step=3, evaluated=True, leads=False)
    generations.stand(tmp_path, 7, 0, own)
    assert generations.standings(tmp_path, 7, [0, 1]) is None
    generations.stand(tmp_path, 7, 1, msgspec.structs.replace(own, step=-1))
    found = generations.standings(tmp_path, 7, [0, 1])
    assert max(standing.position for standing in found.values()) == own.position


def test_who_was_lost_and_is_back_before_anybody_looked_is_known(tmp_path):
    roster = begun(tmp_path, Plan(microbatch=1, replicate=3))
    before = generations.current(tmp_path)
    roster.lose({1}, trained={1})
    generations.touch(generations.ready_file(tmp_path, 1, 1))
    roster.look(0.0, set())
    after = generations.current(tmp_path)
    assert after.members == before.members
    assert (after.lost_since(before), after.back_since(before)) == ([1], [1])
    assert after.lost_since(after) == after.back_since(after) == []
