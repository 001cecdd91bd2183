"""CUDA code inside binaries: ELF, fatbins, cubins and PTX, and the policy over them."""
