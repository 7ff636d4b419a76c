//! Collective algorithms over links and kernels.
