"""Find the fastest of several requests without a prediction of each."""

import dataclasses
import math
from collections.abc import Sequence

from bench.extensions.predict.calibration import Calibration
from bench.extensions.predict.prediction import Prediction
from bench.extensions.predict.request import PredictionRequest, least_step_s, predicted


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictedPair:
    """A request, which names a compressor and a collective, and the request's predicted step."""

    request: PredictionRequest
    prediction: Prediction


def fastest(calibration: Calibration, requests: Sequence[PredictionRequest]) -> PredictedPair:
    """Return the fastest request with its prediction; if several are equally fast, the first of them.

    Requests of the same ranks are predicted in the order of a lower bound of their step times, and those whose bound
    exceeds the shortest time found so far are left out.
    """
    least_s = [least_step_s(calibration, request) for request in requests] if len(requests) > 1 else [0.0]
    found: dict[int, Prediction] = {}
    for index in sorted(range(len(requests)), key=least_s.__getitem__):
        if least_s[index] > min((each.step_time_s for each in found.values()), default=math.inf):
            break
        found[index] = predicted(calibration, requests[index])
    best = max(sorted(found), key=lambda index: found[index].samples_per_s)
    return PredictedPair(request=requests[best], prediction=found[best])
