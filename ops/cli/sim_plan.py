"""The runs that a comparison needs, and the report that their outcomes come to."""

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from broker.sim.comparison import against_best_peers, best_peers
from broker.sim.contestants import Contestant
from broker.sim.lineup import DEFAULTS, ROUND_ROBIN, chosen
from broker.sim.load import ALL_AT_ONCE_SPEED, load_of
from broker.sim.report import Report, Sensitivity, entry, setting_facts, trace_facts
from broker.sim.request import Workload
from broker.sim.runs import Outcome, Setting
from broker.sim.sensitivity import Seeds, sensitivity, variants
from ops.cli.sim_pool import Run, Unfit, required


class Plan:
    """What to run: round robin twice for the load, each policy, then the variants."""

    def __init__(
        self,
        policies: Sequence[Contestant],
        *,
        setting: Setting,
        seeds: Sequence[int],
        sensitive: bool,
    ) -> None:
        self._policies = policies
        self._setting = setting
        self._seeds = seeds
        self._variants = variants(setting) if sensitive else {}
        self._robust = chosen(DEFAULTS)
        self.runs = [*self._load_runs(), *self._policy_runs(), *self._variant_runs()]

    def _load_runs(self) -> Iterator[Run]:
        seed = self._seeds[0]
        yield Run(label=ROUND_ROBIN, setting=self._setting, seed=seed)
        full = replace(self._setting, speed=ALL_AT_ONCE_SPEED, changes=())
        yield Run(label=ROUND_ROBIN, setting=full, seed=seed)

    def _policy_runs(self) -> Iterator[Run]:
        for seed in self._seeds:
            for one in self._policies:
                timed = one.is_ours and seed == self._seeds[0]
                yield Run(label=one.label, setting=self._setting, seed=seed, timed=timed)

    def _variant_runs(self) -> Iterator[Run]:
        for setting in self._variants.values():
            for seed in self._seeds:
                for one in self._robust:
                    yield Run(label=one.label, setting=setting, seed=seed)

    def report(self, workload: Workload, outcomes: Sequence[Outcome | Unfit]) -> Report:
        """Sum up the outcomes of `runs`. Raises SimError when the trace does not fit."""
        rest = iter(outcomes)
        at_point, all_at_once = required([next(rest), next(rest)])
        by_seed = [required([next(rest) for _ in self._policies]) for _ in self._seeds]
        load = load_of(
            workload,
            speed=self._setting.speed,
            at_point=at_point.figures,
            all_at_once=all_at_once.figures,
        )
        entries = tuple(
            entry(one, [row[place].figures for row in by_seed])
            for place, one in enumerate(self._policies)
        )
        best = best_peers(entries)
        point = f"{workload.name} @ {self._setting.speed:g}"
        return Report(
            policies=entries,
            setting=setting_facts(self._setting, seeds=self._seeds),
            trace=trace_facts(workload),
            load=load,
            best_peer=best,
            against_best_peer=against_best_peers(entries, best, load),
            overloaded=(point,) if load.overloaded else (),
            sensitivity=self._sensitivity(rest) if self._variants else None,
        )

    def _sensitivity(self, rest: Iterator[Outcome | Unfit]) -> Sensitivity:
        found = {name: self._seeds_of(rest) for name in self._variants}
        return sensitivity(found, ours=[one.label for one in self._robust if one.is_ours])

    def _seeds_of(self, rest: Iterator[Outcome | Unfit]) -> Seeds | str:
        """Take one variant's outcomes; if any could not be run, why."""
        rows = [[next(rest) for _ in self._robust] for _ in self._seeds]
        problem = next((one.problem for row in rows for one in row if isinstance(one, Unfit)), "")
        if problem:
            return problem
        done = [required(row) for row in rows]
        return {
            one.label: [row[place].figures for row in done]
            for place, one in enumerate(self._robust)
        }
