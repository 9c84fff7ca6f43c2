"""The commands, and the examples at the head of their help."""

from __future__ import annotations

from itertools import groupby

Examples = tuple[tuple[str, str], ...]
"""Command lines, each with what it does."""


def _read(text: str) -> Examples:
    lines = (line.partition("  # ") for line in text.strip().splitlines())
    return tuple((command, told) for command, _, told in lines)


FIRST = _read("""
flowspec chat  # talk to the bundled model, on four processes of this machine
flowspec generate "What is 17 + 25?"  # one answer
flowspec plan --devices 2x raspberry-pi-5  # what would run where, and how fast; starts nothing
flowspec chat --cluster my-cluster.toml --model Qwen/Qwen3-0.6B  # a model on your own devices
""")
"""Those of `flowspec` itself."""
_OTHERS = _read("""
flowspec daemon --host 192.168.1.21  # on each device, at its own address
flowspec daemon --host 192.168.1.21 --memory 3GiB --threads 3  # leave some of it to others
flowspec chat  # the bundled model, on four processes of this machine
flowspec chat --model Qwen/Qwen3-0.6B  # a model of the hub, on four processes of this machine
flowspec chat --cluster my-cluster.toml --model Qwen/Qwen3-0.6B  # on the devices of that file
flowspec chat --resume  # go on with the last dialogue
flowspec generate "What is 17 + 25?"  # one answer
flowspec generate --max-new-tokens 50 --json "Tell me a story."  # for programs
flowspec generate --prompts prompts.txt --parallel 4  # a file of prompts, four at a time
flowspec generate --cluster my-cluster.toml -m Qwen/Qwen3-0.6B "Hello"  \
# a model of the hub on the devices of that file
flowspec serve  # on port 8000 of this machine: the OpenAI API, and a page to look at
flowspec serve --cluster my-cluster.toml --model Qwen/Qwen3-0.6B  # on the devices of that file
flowspec verify --local 2  # the bundled model, in two processes and in one
flowspec verify --cluster my-cluster.toml --model Qwen/Qwen3-0.6B  # on the devices of that file
flowspec verify --method all --local 1,2,4 --temperatures 0,1 --seeds 1,2  # every method
flowspec bench --experiment paper-bundled --limit 12  # five Jetsons, in virtual time
flowspec bench --world cluster --local 2 --methods ar,continuous --limit 2  \
# plain decoding and FlowSpec, in processes of this machine
flowspec plan --devices 2x raspberry-pi-5  # the bundled model, on two boards
flowspec plan --shape llama-3-8b --devices 4x jetson-orin-nano,raspberry-pi-5  \
# a well-known model, without its files
flowspec plan --cluster my-cluster.toml --model Qwen/Qwen3-4B  # asks the devices of that file
flowspec drafters Qwen/Qwen3-4B  # what others published for it, best first
flowspec fetch Qwen/Qwen3-4B-GGUF --list  # what there is
flowspec fetch Qwen/Qwen3-4B-GGUF --quant Q4_K_M  # one file; a download that broke off goes on
flowspec fetch Qwen/Qwen3-0.6B  # a checkpoint
flowspec profile --keep  # measure this machine for the daemons of this user
flowspec profile --quick --cluster my-cluster.toml  # in seconds, with the links to the daemons
flowspec devices  # daemons that were started with --announce
flowspec devices --write my-cluster.toml  # and a cluster file of them
flowspec doctor --cluster my-cluster.toml --model Qwen/Qwen3-0.6B  # devices, links and memory
flowspec doctor --local 1 --json > doctor.json  # this machine, as a file to send in
flowspec keygen --cluster my-cluster.toml  # a key for the head and for each device
flowspec keygen --cluster my-cluster.toml --revoke pi-2  # take a device off the list
flowspec completion bash > ~/.local/share/bash-completion/completions/flowspec  # for bash
flowspec completion zsh > ~/.zfunc/_flowspec  # for zsh, with ~/.zfunc in its fpath
flowspec completion fish > ~/.config/fish/completions/flowspec.fish  # for fish
""")
OF_COMMAND = {name: tuple(own) for name, own in groupby(_OTHERS, key=lambda each: each[0].split()[1])}
