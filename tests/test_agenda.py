"""What is due at which boundary: pure rules, without a job."""

import pytest

from megatron_dynatrain.agenda import NEVER, Agenda, Cancel, Cost, Formed, Item, Switch, Unformed, too_late
from megatron_dynatrain.config import ScheduledSwitch
from megatron_dynatrain.layout import Layout


def asked(number, layout, at=None):
    return Switch(id=str(number), layout=layout, at_iteration=at)


def agenda(*schedule, train_iters=20):
    return Agenda([ScheduledSwitch(at_iteration=at, layout=layout) for at, layout in schedule], train_iters)


def test_the_schedule_is_carried_out_in_order_and_an_empty_agenda_is_never_due():
    plan = agenda((3, "a"), (3, "b"), (7, "c"), (25, "too late"))
    assert plan.next_iteration == 3
    assert plan.take(2) == ([], [])
    assert plan.take(3) == ([Item("switch", "a"), Item("switch", "b")], [])
    assert plan.next_iteration == 7 and plan.schedule == [(7, "c")]
    assert plan.take(9) == ([Item("switch", "c")], [])  # iterations 7 and 8 were skipped
    assert plan.next_iteration == NEVER


def test_what_is_asked_joins_the_schedule():
    plan = agenda((3, "a"), (9, "b"))
    assert plan.hear(asked(1, "x", at=5), 2) == []
    assert plan.hear(asked(2, "y"), 3) == []
    assert plan.take(3) == ([Item("switch", "a"), Item("switch", "y", ("2",))], [])
    assert plan.next_iteration == 5
    assert plan.take(5) == ([Item("switch", "x", ("1",))], [])
    assert plan.next_iteration == 9


def test_the_newest_of_one_boundary_wins_and_equal_ones_are_one():
    plan = agenda()
    deep = Layout(tensor_model_parallel_size=2)
    for message in (asked(1, "a"), asked(2, deep), asked(3, "b", at=4), asked(4, deep, at=4)):
        assert plan.hear(message, 4) == []
    items, dropped = plan.take(4)
    assert items == [Item("switch", deep, ("2", "4"))]
    assert [(drop.switch.id, drop.answer, drop.by.id) for drop in dropped] == [("1", "superseded", "4"),
                                                                               ("3", "superseded", "4")]


@pytest.mark.parametrize("at, now, expected", [
    (None, 19, None), (5, 5, None), (6, 5, None), (4, 5, "iteration 4 had passed"), (20, 5, "no step comes after iteration 20"),
    (0, 0, None), (19, 5, None)])
def test_what_comes_too_late(at, now, expected):
    reason = too_late(at, now, 20)
    assert (reason is None) == (expected is None) and (expected or "") in (reason or "")
    plan = agenda()
    dropped = plan.hear(asked(1, "a", at=at), now)
    assert [drop.answer for drop in dropped] == ([] if expected is None else ["expired"])
    assert (plan.next_iteration == NEVER) == (expected is not None)


def test_what_is_taken_back_is_said_once_and_nothing_else_is_touched():
    plan = agenda((5, "a"))
    plan.hear(asked(1, "x", at=6), 2)
    plan.hear(asked(2, "y", at=7), 2)
    dropped = plan.hear(Cancel(id="1"), 3)
    assert [(drop.switch.id, drop.answer) for drop in dropped] == [("1", "cancelled")]
    assert plan.hear(Cancel(id="1"), 3) == [] == plan.hear(Cancel(id="none"), 3)
    assert [plan.take(at)[0] for at in (5, 6, 7)] == [[Item("switch", "a")], [], [Item("switch", "y", ("2",))]]


def test_costs_are_due_at_once_and_come_before_what_was_asked():
    plan = agenda((30, "never"), (4, "a"))
    plan.hear(asked(1, "x"), 2)
    plan.hear(Cost(id="2", layout="y"), 2)
    assert plan.next_iteration == 0
    assert plan.take(2)[0] == [Item("cost", "y", ("2",)), Item("switch", "x", ("1",))]
    assert plan.next_iteration == 4


def test_at_the_end_everything_that_was_asked_expires():
    plan = agenda((5, "a"))
    plan.hear(asked(1, "x", at=6), 2)
    plan.hear(Cost(id="2", layout="y"), 2)
    assert [(drop.switch.id, drop.answer, drop.reason) for drop in plan.close("the end")] == [("1", "expired", "the end")]
    assert plan.close("the end") == []


class TestOtherRanks:
    """What needs other ranks than the present ones waits until they are ready."""

    @staticmethod
    def needs_ranks(layout):
        return layout in ("big", "huge")

    def sorted_out(self, plan, iteration):
        return [item.layout for item in plan.sort_out(plan.take(iteration)[0], self.needs_ranks)]

    def test_it_waits_and_is_due_when_they_are_ready(self):
        plan = agenda()
        plan.hear(asked(1, "big"), 2)
        assert self.sorted_out(plan, 2) == [] and [wish.key for wish in plan.wishes] == ["1"]
        assert plan.next_iteration == NEVER
        plan.hear(Formed(id="1", generation=1, base=0), 6)
        assert plan.next_iteration == 0
        assert self.sorted_out(plan, 6) == ["big"]
        assert plan.wishes == []

    def test_the_schedule_keeps_its_order(self):
        plan = agenda((3, "big"), (4, "a"), (5, "huge"))
        assert self.sorted_out(plan, 3) == [] == self.sorted_out(plan, 4) == self.sorted_out(plan, 5)
        assert [wish.layout for wish in plan.wishes] == ["big", "a", "huge"]
        plan.hear(Formed(id=plan.wishes[0].key, generation=1, base=0), 8)
        assert self.sorted_out(plan, 8) == ["big"]  # what comes behind a change of ranks is for the next boundary
        assert self.sorted_out(plan, 9) == ["a"]
        assert [wish.layout for wish in plan.wishes] == ["huge"]

    def test_a_newer_request_takes_the_place_of_one_that_waits(self):
        plan = agenda()
        plan.hear(asked(1, "big"), 2)
        self.sorted_out(plan, 2)
        plan.hear(asked(2, "a"), 3)
        items, dropped = plan.take(3)
        assert [(drop.switch.id, drop.answer, drop.by.id) for drop in dropped] == [("1", "superseded", "2")]
        assert [item.layout for item in plan.sort_out(items, self.needs_ranks)] == ["a"] and plan.wishes == []

    def test_one_that_waits_can_be_taken_back_and_refused_and_expires(self):
        refusal = Unformed(id="1", generation=1, base=0, reason="it died")
        for message, answer in ((Cancel(id="1"), "cancelled"), (refusal, "refused"), (None, "expired")):
            plan = agenda()
            plan.hear(asked(1, "big"), 2)
            self.sorted_out(plan, 2)
            dropped = plan.close("the end") if message is None else plan.hear(message, 3)
            assert [(drop.switch.id, drop.answer) for drop in dropped] == [("1", answer)]
            assert plan.wishes == []

    def test_it_is_told_once(self):
        plan = agenda()
        plan.hear(asked(1, "big"), 2)
        self.sorted_out(plan, 2)
        plan.hear(asked(1, "big"), 5)  # by the rank that has taken over the run directory
        assert [wish.key for wish in plan.wishes] == ["1"]
