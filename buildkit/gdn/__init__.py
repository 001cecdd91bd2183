"""Gated delta net: the float64 reference, the cases, the comparison, the kernel harness and the probe checkpoint."""
