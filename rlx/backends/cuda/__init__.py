"""The device "cuda": NVIDIA cards, through LLVM and the driver alone."""
