"""`horovod.tensorflow` against the tables of tests/conformance."""

from tf_adapters import Eager, Function, Session

from conformance.suite import Conformance


class TestTensorFlow(Conformance):
    adapters = (Eager(), Function(), Session())
