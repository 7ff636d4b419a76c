"""Tables of cases and mistakes that every adapter has to pass, with one oracle in NumPy.

`cases.py` and `mistakes.py` hold the tables, `oracle.py` computes the expected results, `adapter.py` is the interface
that each framework implements, `suite.py` runs the tables. Each framework's folder in tests/parallel has a file that
implements the interface.
"""

import pytest

pytest.register_assert_rewrite("conformance.suite", "conformance.oracle")
