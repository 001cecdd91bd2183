"""The faults that a gated delta net is known to have had, as frozen named values.

The reference can compute with one of them injected (``buildkit.gdn.layer``); an image that fails is compared with each,
and the report names the one that reproduces its output. The sentence is what the report prints.
"""

from __future__ import annotations

from enum import Enum


class Fault(Enum):
    """One way of computing a GDN layer wrong; ``value`` is the name on command lines and in reports."""

    KEY_BAND_ZEROED = "key-band-zeroed"
    OUTPUT_ZERO = "output-zero"
    L2_NORM_LANE_0 = "l2-norm-lane-0"
    L2_NORM_OTHERS_RAW = "l2-norm-others-raw"
    CONV_STATE_DROPPED = "conv-state-dropped"
    CONV_STATE_FROZEN = "conv-state-frozen"
    CONV_STATE_UNREAD = "conv-state-unread"
    STATE_NOT_RESET = "state-not-reset"
    DECAY_TWICE = "decay-twice"
    DECAY_RAW = "decay-raw"
    DECAY_IGNORED = "decay-ignored"
    Q_NOT_SCALED = "q-not-scaled"
    QK_SWAPPED = "qk-swapped"
    QK_SWAPPED_SCALED = "qk-swapped-scaled"
    SILU_MISSING = "silu-missing"
    GQA_INTERLEAVED = "gqa-interleaved"
    GATE_Z_IGNORED = "gate-z-ignored"

    @property
    def sentence(self) -> str:
        """What is computed wrong, and where, for people."""
        return _SENTENCES[self]

    @property
    def consequence(self) -> str:
        """What it means for the build or the server that shows it; one clause."""
        return _CONSEQUENCES.get(self, "the GDN kernels or the code that calls them are wrong")


_SENTENCES = {
    Fault.KEY_BAND_ZEROED: "key band zeroed in causal_conv1d_fwd",
    Fault.OUTPUT_ZERO: "every GDN output zero",
    Fault.L2_NORM_LANE_0: "L2 norm: the warp's sum reaches lane 0 only, other lanes use partial sums",
    Fault.L2_NORM_OTHERS_RAW: "L2 norm: only lane 0's elements are normalised",
    Fault.CONV_STATE_DROPPED: "conv state not carried from prefill into decode",
    Fault.CONV_STATE_FROZEN: "conv state not updated by decode: each step sees the prompt's last tokens",
    Fault.CONV_STATE_UNREAD: "conv state not read by decode: each step sees no earlier token",
    Fault.STATE_NOT_RESET: "recurrent state not reset between sequences",
    Fault.DECAY_TWICE: "decay exponentiated twice",
    Fault.DECAY_RAW: "decay not exponentiated: the state is multiplied by the log decay",
    Fault.DECAY_IGNORED: "decay ignored: the state is never damped",
    Fault.Q_NOT_SCALED: "q not scaled by K^-1/2",
    Fault.QK_SWAPPED: "q and k swapped",
    Fault.QK_SWAPPED_SCALED: "q and k swapped after q was scaled",
    Fault.SILU_MISSING: "SiLU missing after the conv",
    Fault.GQA_INTERLEAVED: "key heads mapped to value heads interleaved instead of consecutive",
    Fault.GATE_Z_IGNORED: "gate z ignored in the gated norm",
}

_CONSEQUENCES = {
    Fault.KEY_BAND_ZEROED: "this build lacks the GDN conv fix",
    Fault.OUTPUT_ZERO: "the linear-attention layers do nothing",
    Fault.L2_NORM_LANE_0: "this build lacks the L2 norm fix of 2026-02-28",
    Fault.L2_NORM_OTHERS_RAW: "this build lacks the L2 norm fix of 2026-02-28",
    Fault.CONV_STATE_DROPPED: "the conv state's slots are not written by prefill or not read by decode",
    Fault.CONV_STATE_FROZEN: "the conv state's slots are not written by decode",
    Fault.CONV_STATE_UNREAD: "the conv state's slots are not read by decode",
    Fault.STATE_NOT_RESET: "one conversation leaks into the next",
    Fault.DECAY_TWICE: "host and kernel disagree about who exponentiates g",
    Fault.DECAY_RAW: "host and kernel disagree about who exponentiates g",
    Fault.GQA_INTERLEAVED: "the host repeats key heads in the wrong order",
}
