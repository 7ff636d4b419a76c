"""Parts that the estimators of all frameworks share; see the submodules."""
