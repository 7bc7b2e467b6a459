"""Policy losses by name, and the critic's loss. `megarl.algorithms.objective` joins the terms of an update."""

from megarl.algorithms.losses.base import POLICY_LOSSES
from megarl.algorithms.losses.cispo import cispo
from megarl.algorithms.losses.covariance import clip_cov, kl_cov
from megarl.algorithms.losses.cpgd import cpgd
from megarl.algorithms.losses.dppo import dppo_kl, dppo_tv
from megarl.algorithms.losses.dro import dro
from megarl.algorithms.losses.gmpo import gmpo
from megarl.algorithms.losses.gpg import gpg
from megarl.algorithms.losses.gspo import gspo
from megarl.algorithms.losses.ipo import ipo, kpop
from megarl.algorithms.losses.luffy import luffy
from megarl.algorithms.losses.m2po import m2po
from megarl.algorithms.losses.opsm import opsm
from megarl.algorithms.losses.pg_is import pg_is
from megarl.algorithms.losses.ppo import ppo
from megarl.algorithms.losses.sapo import sapo
from megarl.algorithms.losses.value import value_loss
from megarl.algorithms.losses.vespo import vespo

__all__ = [
    "POLICY_LOSSES",
    "cispo",
    "clip_cov",
    "cpgd",
    "dppo_kl",
    "dppo_tv",
    "dro",
    "gmpo",
    "gpg",
    "gspo",
    "ipo",
    "kl_cov",
    "kpop",
    "luffy",
    "m2po",
    "opsm",
    "pg_is",
    "ppo",
    "sapo",
    "value_loss",
    "vespo",
]
