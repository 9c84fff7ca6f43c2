"""How devices become a pipeline and stay one: who has whose lease, who is lost, when one is formed anew."""
