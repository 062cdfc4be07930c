"""Times attention beside its peers; a wrong result is never timed. docs/bench.md has the rules."""
