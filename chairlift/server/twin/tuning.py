"""Has the settings of models follow their traffic: asks the twin at leisure, and turns what the tuner decides."""

import asyncio
import logging
import time

import msgspec

from chairlift.config.server import ServerConfig
from chairlift.errors import ConfigError, Unavailable
from chairlift.plan.tuner import Tuner, TuningDecision
from chairlift.plan.what_if import Change, SequenceQuestion
from chairlift.plan.what_if_process import MOST_S
from chairlift.runners.host_cpus import usable_cpus
from chairlift.server.http.api_errors import ApiError
from chairlift.server.models.registry import Models
from chairlift.server.models.sequence_service import SequenceService
from chairlift.server.twin.past_traffic import WINDOW_S, lately, past_of
from chairlift.server.twin.twin import Question, Twin

log = logging.getLogger(__name__)

# Windows after a change within which it must be judged; the traffic of the first is what it is judged by.
_WINDOWS = 3


class Tuning:
    """Turns the models of a server that are to be tuned, one after the other. All calls belong to one event loop.

    Of the processors' time it takes `tune_cpu_share` on average: after each question it rests for as long as that
    takes. What a change is judged by is the traffic of `window_s` after it; what can't be judged within three times
    that is taken back.
    """

    def __init__(self, models: Models, twin: Twin, config: ServerConfig, window_s: float = WINDOW_S) -> None:
        self._models, self._twin, self._window_s = models, twin, window_s
        self._every = config.tune_every_s
        self._share = config.tune_cpu_share * usable_cpus()

    async def run(self) -> None:
        """Tune until this is cancelled."""
        while True:
            await self._rest(self._every)
            for service in self._tuned():
                try:
                    cpu_s = await self.look_at(service)
                except Exception:
                    log.exception("%s: the tuner failed; its settings stay as they are", service.name)
                    self._take_back_in_time(service, "the tuner failed")
                    cpu_s = MOST_S
                await self._rest(cpu_s / self._share)

    async def _rest(self, seconds: float) -> None:
        """Ask nothing for so long, which may be long on few processors; see that no change is on trial for ever."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            await asyncio.sleep(min(left, self._every))
            for service in self._tuned():
                self._take_back_in_time(service, "there was no time to ask the twin")

    def _tuned(self) -> list[SequenceService]:
        """Those of the models that are to be tuned and serve, first of all those with a change on trial."""
        found = [each for each in self._models.all() if isinstance(each, SequenceService)]
        found = [each for each in found if each.client.config.tunes and each.ready]
        return sorted(found, key=lambda each: each.metrics.tuner is None or not each.metrics.tuner.on_trial)

    async def look_at(self, service: SequenceService) -> float:
        """One round of one model; return the processor time that it took, in seconds."""
        metrics = service.metrics
        tuner = metrics.tuner = metrics.tuner or Tuner(service.client.config)
        asked_of = tuner.config
        # Whoever changed them, what came under other settings says nothing of these.
        if time.monotonic() < service.former.last_change + self._window_s:
            return 0.0
        try:
            past, changes = past_of(service), [Change(config=each) for each in tuner.alternatives()]
            _, answer = await self._twin.ask(lambda: _with_memory(lately(past, changes)))
        except ApiError as error:
            # Too little came to say anything, which is no news, or others ask.
            level = logging.DEBUG if error.status == 409 else logging.INFO
            log.log(level, "%s: nothing was turned: %s", service.name, error)
            self._take_back_in_time(service, str(error))
            return 0.0
        except (Unavailable, ConfigError) as error:
            log.info("%s: nothing was turned: %s", service.name, error)
            self._take_back_in_time(service, str(error))
            metrics.tuner_cpu_s += MOST_S
            return MOST_S
        metrics.tuner_cpu_s += answer.cpu_s
        # If somebody has changed settings meanwhile, this answers a question that nobody asks any more.
        if tuner.config is asked_of:
            self._carry_out(service, tuner, tuner.hear(answer))
        return answer.cpu_s

    def _take_back_in_time(self, service: SequenceService, problem: str) -> None:
        """Of a change that can't be judged now, see that it is not left on trial for ever."""
        tuner = service.metrics.tuner
        if tuner is None or not tuner.on_trial:
            return
        if time.monotonic() >= service.former.last_change + _WINDOWS * self._window_s:
            reason = f"for {_WINDOWS * self._window_s:g} s nothing could judge it: {problem}"
            self._carry_out(service, tuner, tuner.give_up(reason))

    def _carry_out(self, service: SequenceService, tuner: Tuner, decision: TuningDecision) -> None:
        log.log(logging.DEBUG if decision.setting is None else logging.INFO, "%s: %s", service.name, decision.reason)
        if tuner.config is not service.client.config:
            service.retune(tuner.config)


def _with_memory(question: Question) -> Question:
    """The KV memory stays what it is, whatever is turned."""
    assert isinstance(question, SequenceQuestion)
    question.config = msgspec.structs.replace(question.config, kv_cache_gb=question.config.kv_cache_gb or 1.0)
    return question
