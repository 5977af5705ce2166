"""Every kind of component refuses what its options do not allow, in one sentence."""

from __future__ import annotations

import pytest

from bench.core import spec
from bench.core.errors import UsageError


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("datasets", "digits:size=3", "digits has no option 'size'"),
        ("datasets", "synthetic:train_size=0", "train_size=0 is not possible"),
        ("datasets", "synthetic:size=4", "size=4 is not possible"),
        ("datasets", "synthetic:classes=1", "classes=1 is not possible"),
        ("datasets", "synthetic:noise=2", "noise=2 is not possible"),
        ("datasets", "cifar100:url=nowhere", "url=nowhere is not possible"),
        ("datasets", "cifar11", "did you mean 'cifar10'"),
        ("models", "small_cnn:width=0", "width=0 is not possible"),
        ("models", "small_cnn:hidden=many", "hidden=many is not possible"),
        ("models", "resnet20:depth=3", "resnet20 has no option 'depth'"),
        ("models", "resnet50:stem=large", "stem=large is not possible"),
        ("models", "resnet19", "there is no model 'resnet19'"),
        ("models", "gpt:width=100,heads=3", "gpt: width=100 cannot be divided among heads=3; make it a multiple"),
        ("optimizers", "sgd:momentum=2", "sgd: momentum=2 is not possible"),
        ("optimizers", "sgd:momentum=1", "sgd: momentum=1 is not possible"),
        ("optimizers", "sgd:weight_decay=-1", "sgd: weight_decay=-1 is not possible"),
        ("optimizers", "sgd:nesterov=true,momentum=0", "nesterov=true needs momentum above 0; leave one of them out"),
        ("optimizers", "sgd:momentun=0.5", "did you mean 'momentum'"),
        ("optimizers", "adam:beta1=1", "adam: beta1=1 is not possible"),
        ("optimizers", "adam:eps=0", "adam: eps=0 is not possible"),
        ("optimizers", "adamw:beta2=1.5", "adamw: beta2=1.5 is not possible"),
        ("optimizers", "adamw:weight_decay=nan", "adamw: weight_decay=nan is not possible"),
        ("optimizers", "adagrad:eps=0", "adagrad: eps=0 is not possible"),
        ("optimizers", "rmsprop:alpha=1", "rmsprop: alpha=1 is not possible"),
        ("optimizers", "adabelief:beta1=0", "adabelief: beta1=0 is not possible: give more than 0"),
        ("optimizers", "max_adabelief:beta1=0", "max_adabelief: beta1=0 is not possible: give more than 0"),
        (
            "optimizers",
            "max_adabelief:mode=gradient,reduce=sum",
            "mode=gradient exchanges no moments; leave reduce and recursion out",
        ),
        (
            "optimizers",
            "max_adabelief:recursion=merged,reduce=sum",
            "would multiply the maximum by the number of ranks in every step",
        ),
        ("optimizers", "max_adabelief:recursion=merged,max_of=previous", "max_of=previous keeps no maximum for rec"),
        ("optimizers", "muon:scale=moonshot", "muon: scale=moonshot is not possible"),
        ("optimizers", "muon:newton_schulz=0", "muon: newton_schulz=0 is not possible"),
        ("optimizers", "dion:rank_fraction=0", "dion: rank_fraction=0 is not possible"),
        ("optimizers", "dion:momentum=1", "dion: momentum=1 is not possible"),
        ("optimizers", "adan", "there is no optimizer 'adan' .did you mean 'adam'"),
    ],
)
def test_bad_options_are_usage_errors(kind: str, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        spec.build(kind, text)
