#!/bin/sh
# Stops the services at removal; an upgrade ("upgrade" in Debian, "1" in RPM) leaves them running.
case "${1:-remove}" in
upgrade | 1) exit 0 ;;
esac
if [ -d /run/systemd/system ]; then
    systemctl disable --now stallscope-agent || true
fi
