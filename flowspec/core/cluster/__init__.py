"""How devices become a pipeline and stay one: who holds whom, who is lost, when one is formed anew."""
