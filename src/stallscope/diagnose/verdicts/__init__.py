"""One file per kind of verdict: takes findings, returns the verdict."""
