"""The same work done by others, each in a process of its own: what `megatrain bench --baseline` compares with."""
