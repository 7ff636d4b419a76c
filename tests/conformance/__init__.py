"""What every adapter has to do, as one table of cases with one oracle in NumPy.

`cases.py` and `mistakes.py` are the tables, `oracle.py` says what is right, `adapter.py` is all that an adapter has to
tell, `suite.py` runs the tables on it. Each folder of tests/parallel has a file that does so for its framework.
"""

import pytest

pytest.register_assert_rewrite("conformance.suite", "conformance.oracle")
