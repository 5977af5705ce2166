"""Columns that `bench predict --json` has and `metrics.csv` does not, of one predicted method."""

from bench.core.columns import Column, num_bytes, seconds

COLUMNS = (
    Column("model", "num_parameters", int, "parameters that are trained"),
    Column("first epoch", "denser_epochs", int, "epochs at the start in which the method sends more than later"),
    seconds(
        "first epoch",
        "first_epoch_step_time_s",
        "time of a step in the first epoch (empty: the method then sends no more than later)",
    ),
    num_bytes(
        "first epoch",
        "first_epoch_payload_bytes_per_step",
        "bytes that a rank sends in a step in the first epoch (empty: as for the time)",
    ),
    Column(
        "comparison", "times_as_fast", float, "samples per second / those with dense bf16 gradients", better="higher"
    ),
    Column(
        "comparison",
        "told_apart",
        bool,
        "false if the difference from the fastest method is smaller than the error of such predictions; "
        "always false for the fastest method",
    ),
    Column("comparison", "dense_collective", str, "fastest collective for dense bf16 gradients"),
    seconds("comparison", "dense_step_time_s", "time of a step with dense bf16 gradients on that collective"),
    seconds("comparison", "step_as_it_is_s", "time of a step of the profiled script without changes, on these links"),
)
