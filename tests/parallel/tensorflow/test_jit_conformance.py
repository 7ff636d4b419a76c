"""`horovod.tensorflow` in functions that XLA compiles, against the tables of tests/conformance."""

from tf_adapters import Compiled

from conformance.suite import Conformance


class TestCompiled(Conformance):
    adapters = (Compiled(),)
