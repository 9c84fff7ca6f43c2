#!/bin/bash
# Enough of systemd to run our unit as it says.
unit=$HOME/.config/systemd/user/flowspec-daemon.service
printf '%s\n' "$*" >> "$HOME/systemctl"
case "$2" in
    start)
        command=$(sed -n 's/^ExecStart=//p' "$unit" | sed "s|%h|$HOME|g")
        log=$(sed -n 's/^StandardError=append://p' "$unit" | sed "s|%h|$HOME|g")
        . "$HOME/.config/flowspec/daemon.env"
        eval "exec setsid $command" >> "$log" 2>&1 < /dev/null &
        echo $! > "$HOME/main.pid"
        ;;
    disable)
        pid=$(cat "$HOME/main.pid" 2>/dev/null) || exit 0
        kill "$pid"
        while [ -e "/proc/$pid" ]; do sleep 0.05; done
        rm -f "$HOME/main.pid"
        ;;
    show) cat "$HOME/main.pid" 2>/dev/null || echo 0 ;;
esac
