//! PyO3 module horovod._core.
