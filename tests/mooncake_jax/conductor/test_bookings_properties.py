"""Whatever happens in whatever order, the books equal a slow account of it, and end at zero."""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvstore.errors import RefusedError

PREFIXES = [list(range(start, start + 64)) for start in (0, 1000)]
INSTANCES = ("p0", "p1", "d0", "d1")


class Account:
    """One placed request as a slow reader would keep it."""

    def __init__(self, placement, keys, held, tokens):
        self.phases = {"prefill": placement.prefill.name, "decode": placement.decode.name}
        self.seen = set()
        self.expected = {(f"{placement.prefill.name}-home", key) for key in keys[held:]}
        self.tokens = tokens


class BookKeeping(RuleBasedStateMachine):
    cluster_type: type

    @initialize()
    def start(self):
        self.cluster = self.cluster_type(booking_seconds=1e6, heartbeat_seconds=1e6)
        self.accounts = {}
        self.listed = dict.fromkeys(INSTANCES, ())
        self.settling = []
        self.next_id = 0

    def close(self, request_id, role, ok):
        account = self.accounts[request_id]
        if account.phases.pop(role, None) is None:
            return
        if role == "prefill" and ok:
            self.settling.append((self.cluster.now + 3.0, account.expected))
        if not account.phases:
            del self.accounts[request_id]

    @rule(prefix=st.sampled_from(PREFIXES), tail=st.integers(1, 80), again=st.booleans(), data=st.data())
    def place(self, prefix, tail, again, data):
        tokens = prefix + [5000 + self.next_id] * tail
        if again and self.accounts:
            request_id = data.draw(st.sampled_from(sorted(self.accounts)))
        else:
            request_id, self.next_id = f"r{self.next_id}", self.next_id + 1
        for role in ("prefill", "decode"):
            if request_id in self.accounts:
                self.close(request_id, role, ok=False)
        self.settling = [(until, keys) for until, keys in self.settling if until > self.cluster.now]
        keys = self.cluster.keys(tokens)
        held = self.cluster.index.lengths(keys)
        try:
            placement = self.cluster.place(tokens, request_id=request_id)
        except RefusedError:
            return
        home = f"{placement.prefill.name}-home"
        self.accounts[request_id] = Account(placement, keys, held.get(home, 0), len(tokens))

    @rule(name=st.sampled_from(INSTANCES), data=st.data())
    def beat(self, name, data):
        role = "prefill" if name.startswith("p") else "decode"
        here = sorted(r for r, account in self.accounts.items() if account.phases.get(role) == name)
        listed = data.draw(st.lists(st.sampled_from([*here, "stranger"]), unique=True))
        epoch = self.cluster.conductor.instances.get(name).info.instance.epoch
        assert self.cluster.beat(name, epoch=epoch, request_ids=listed, used_slots=len(listed))
        self.listed[name] = listed
        for request_id in here:
            account = self.accounts[request_id]
            if request_id in listed:
                account.seen.add(role)
            elif role in account.seen:
                self.close(request_id, role, ok=True)

    @precondition(lambda self: self.accounts)
    @rule(data=st.data(), phase=st.sampled_from(["prefill", "decode", "all"]), ok=st.booleans())
    def end(self, data, phase, ok):
        request_id = data.draw(st.sampled_from(sorted(self.accounts)))
        self.cluster.end(request_id, phase, ok)
        for role in ("prefill", "decode") if phase == "all" else (phase,):
            if request_id in self.accounts:
                self.close(request_id, role, ok)

    @rule(node=st.sampled_from(["p0-home", "p1-home", "store"]), prefix=st.sampled_from(PREFIXES))
    def hold(self, node, prefix):
        self.cluster.hold(node, prefix)

    @rule(seconds=st.sampled_from([0.1, 1.0, 4.0]))
    def wait(self, seconds):
        self.cluster.now += seconds
        self.cluster.conductor.tick(self.cluster.now)
        self.settling = [(until, keys) for until, keys in self.settling if until > self.cluster.now]

    @rule(name=st.sampled_from(INSTANCES))
    def restart(self, name):
        epoch = self.cluster.conductor.instances.get(name).info.instance.epoch
        self.cluster.register(name, epoch=epoch + 1)
        role = "prefill" if name.startswith("p") else "decode"
        for request_id in [r for r, account in self.accounts.items() if account.phases.get(role) == name]:
            self.close(request_id, role, ok=False)
        self.listed[name] = ()

    @invariant()
    def books_equal_the_account(self):
        if not hasattr(self, "cluster"):
            return
        books = self.cluster.conductor.books
        accounts = self.accounts.values()
        assert books["bookings"] == len(accounts)
        assert books["prefill_bookings"] == sum("prefill" in account.phases for account in accounts)
        assert books["decode_bookings"] == sum("decode" in account.phases for account in accounts)
        expected = set().union(
            *(account.expected for account in accounts if "prefill" in account.phases),
            *(keys for _, keys in self.settling),
        )
        assert books["expected_blocks"] == len(expected)

    @invariant()
    def rows_equal_the_account(self):
        if not hasattr(self, "cluster"):
            return
        view = self.cluster.conductor.view
        for row in [*view.prefill_rows(), *view.decode_rows()]:
            role = "prefill" if row.name.startswith("p") else "decode"
            here = [account for account in self.accounts.values() if account.phases.get(role) == row.name]
            unseen = [account for account in here if role not in account.seen]
            assert row.num_requests == len(self.listed[row.name]) + len(unseen)
            if role == "decode":
                assert row.kv_tokens == sum(account.tokens for account in here)
                assert row.committed_tokens == sum(account.tokens + 16 for account in here)
            elif not unseen:
                assert row.busy_until <= self.cluster.now

    def teardown(self):
        if not hasattr(self, "cluster"):
            return
        for request_id in list(self.accounts):
            self.cluster.end(request_id, ok=False)
        self.cluster.now += 4.0
        self.cluster.conductor.tick(self.cluster.now)
        assert self.cluster.open_books == {}
        assert len(self.cluster.conductor.bookings) == 0


def test_books_are_conserved(cluster_type):
    machine = type("Machine", (BookKeeping,), {"cluster_type": cluster_type})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=60, stateful_step_count=30, deadline=None)
    )
