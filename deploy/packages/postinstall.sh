#!/bin/sh
# Creates the users of the services and reloads systemd. The agent is not started: `systemctl enable --now` does.
set -e
if command -v systemd-sysusers >/dev/null; then
    systemd-sysusers stallscope.conf
else
    for user in stallscope stallscope-agent; do
        id "$user" >/dev/null 2>&1 && continue
        useradd --system --no-create-home --home-dir /var/lib/stallscope --shell /usr/sbin/nologin "$user" 2>/dev/null ||
            adduser -S -D -H -h /var/lib/stallscope -s /sbin/nologin "$user" 2>/dev/null || true
    done
fi
if [ -d /run/systemd/system ]; then
    systemctl daemon-reload
    systemctl try-restart stallscope-agent || true # after an upgrade
fi
