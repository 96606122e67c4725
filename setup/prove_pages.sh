#!/usr/bin/env bash
# Runs each command of the install page and of the compose file's head: prove_pages.sh DIST PYTHON. Needs root.
#
# The functions below replace programs that this machine lacks or must not change: a node is an empty Debian in a folder,
# docker is buildah, helm and kubectl are Helm's engine and the schemas of Kubernetes. The commands themselves are those
# of the pages. A command that fails ends the script. PYTHON: of an environment with the development dependencies.
set -euo pipefail
dist=$(realpath "$1") python=$(realpath -s "$2") repository=$(realpath "$(dirname "$0")/..")
scratch=$(mktemp -d)
node=$scratch/node
cleanup() {
	for folder in proc sys; do ! mountpoint -q "$node/$folder" || umount "$node/$folder"; done
	rm -rf --one-file-system "$scratch"
}
trap cleanup EXIT
mkdir -p "$scratch/work"
cd "$scratch/work"
ln -s "$dist" dist
cp -r "$repository/deploy" .
wheel=$(basename "$dist"/*.whl .whl)

archive=$(apt-get --print-uris update 2>/dev/null | sed -n "s|^'\(.*/debian/\)dists/.*|\1|p" | head -1)
debootstrap --variant=minbase --include=rpm,systemd bookworm "$node" "$archive" >"$scratch/log" 2>&1 || { tail -n 2 "$scratch/log" >&2; exit 1; }
mount -t proc proc "$node/proc"
mount -t sysfs sysfs "$node/sys"
/usr/bin/python3 -m venv "$scratch/venv"

section=
sudo() { "$@"; }
pip() { "$scratch/venv/bin/pip" --quiet --disable-pip-version-check "$@"; }
stallscope() {
	case $section in
	pip | "Without a network" | compose) "$scratch/venv/bin/stallscope" "$@" ;;
	*) chroot "$node" stallscope "$@" ;;
	esac >"$scratch/out" || { tail -n 5 "$scratch/out" >&2; return 1; }
}
scp() { cp "$1" "$node${2#node:}"; }
ssh() { [ "$1" = node ] && shift && { [ "$1" != sudo ] || shift; } && chroot "$node" "$@" >/dev/null; }
dpkg() { rm -f "$node/usr/local/bin/stallscope"; into_node "${@: -1}" dpkg "${@:1:$#-1}"; }
rpm() { chroot "$node" dpkg --purge stallscope >/dev/null 2>&1; into_node "${@: -1}" rpm --force-debian --nodeps "${@:1:$#-1}"; }
apk() { # its files: Debian has no apk
	[ "$1 $2" = "add --allow-untrusted" ] && chroot "$node" rpm --erase --force-debian stallscope && tar -xzf "$3" -C "$node" usr etc 2>/dev/null
	chroot "$node" systemd-sysusers stallscope.conf
}
into_node() { # into_node FILE COMMAND...
	cp "$1" "$node/tmp/" && chroot "$node" "${@:2}" "/tmp/$(basename "$1")" >/dev/null
}
systemctl() { chroot "$node" systemctl "${@/--now/--no-reload}" 2>/dev/null && chroot "$node" systemctl is-enabled "${@: -1}" >/dev/null; }
install() { command install "${@:1:$#-1}" "$node${*: -1}"; }
make() { command make --no-print-directory -C "$repository" --dry-run "$@" >/dev/null; }
docker() { # load -i FILE; run OPTIONS IMAGE; compose -f FILE up -d
	case $1 in
	load) [ "$2" = -i ] && container=$(buildah --storage-driver vfs from --quiet --security-opt "seccomp=deploy/seccomp/stallscope-agent.json" "oci-archive:$3") ;;
	run)
		given=() dropped=()
		while [ $# -gt 0 ]; do
			[ "$1" != --cap-add ] || given+=(--cap-add "CAP_$2")
			shift
		done
		[ ${#given[@]} = 10 ]
		for each in AUDIT_WRITE CHOWN DAC_OVERRIDE FOWNER FSETID KILL MKNOD NET_BIND_SERVICE NET_RAW SETFCAP SETGID SETPCAP SETUID SYS_CHROOT; do
			dropped+=(--cap-drop "CAP_$each")
		done
		buildah --storage-driver vfs run "${dropped[@]}" "${given[@]}" --isolation chroot "$container" -- stallscope trace --quiet --db /tmp/t.db -d 3s
		buildah --storage-driver vfs rm "$container" >/dev/null
		;;
	compose) compose "$3" ;;
	esac
}
compose() { # the hub with the command of the file, on other ports; Prometheus reads its settings
	folder=$(realpath "$(dirname "$1")")
	container=$(buildah --storage-driver vfs from --quiet "oci-archive:$dist/hub.tar")
	mapfile -t words < <("$python" -c 'import sys, yaml; print(*yaml.safe_load(open(sys.argv[1]))["services"]["hub"]["command"], sep="\n")' "$1")
	buildah --storage-driver vfs run --isolation chroot --volume "$folder/hub:/var/lib/stallscope/hub" "$container" -- stallscope "${words[@]}" \
		--otlp-grpc 127.0.0.1:24317 --otlp-http 127.0.0.1:24318 --api 127.0.0.1:28081 >"$scratch/hub.log" 2>&1 &
	server=$!
	for _ in $(seq 120); do ! grep -q ready "$scratch/hub.log" || break; sleep 1; done
	grep -q ready "$scratch/hub.log" || { tail -n 3 "$scratch/hub.log" >&2; return 1; }
	kill -TERM "$(pgrep -n -f -- '--api 127.0.0.1:28081')" # the hub itself, in the container
	wait $server
	buildah --storage-driver vfs rm "$container" >/dev/null
	promtool=$repository/build/prometheus/usr/bin/promtool
	[ ! -x "$promtool" ] || (cd "$folder" && sed "s|/etc/prometheus/|$folder/|" prometheus.yaml >checked.yaml && cp ../prometheus/stallscope-rules.yaml . && "$promtool" check config checked.yaml >/dev/null)
}
helm() { # install NAME CHART OPTIONS
	[ "$1" = install ] && cd "$repository" && "$python" -m pytest -q -p no:cacheprovider tests/deploy/test_chart.py >"$scratch/log" || { tail -n 5 "$scratch/log"; return 1; }
	cd "$scratch/work"
}
kubectl() { # -n NAMESPACE exec daemonset/NAME -- COMMAND
	name=${4#daemonset/}
	grep -q "name: $name\$" deploy/kubernetes/agent.yaml && shift 5 && "$@"
}

run() { # run TEXT: each line is a command
	while IFS= read -r line; do
		line=${line//NAME.whl/$wheel.whl}
		[ -n "${line%%#*}" ] || continue
		printf '%s: %s\n' "$section" "$line"
		eval "$line"
	done < <(sed -e ':a' -e '/\\$/N; s/\\\n//; ta' <<<"$1")
}

block='' inside=''
while IFS= read -r line <&3; do
	case $line in
	'## '*) section=${line#\#\# } ;;
	'```sh') inside=yes block='' ;;
	'```') [ -z "$inside" ] || run "$block"; inside='' ;;
	*) [ -z "$inside" ] || block+=$line$'\n' ;;
	esac
done 3<"$repository/docs/install.md"

section=Slurm
export SLURM_JOB_ID=7
chroot "$node" env SLURM_JOB_ID=7 PATH="$PATH" sh /etc/slurm/prolog.d/stallscope
PYTHONPATH=$repository/src "$python" "$repository/setup/live_job.py" sleep 15 "$node/var/lib/stallscope/slurm/7/agent.log" >/dev/null
chroot "$node" env SLURM_JOB_ID=7 PATH="$PATH" sh /etc/slurm/epilog.d/stallscope
grep -q '^Rank 2' "$node/var/lib/stallscope/slurm/7/report.txt"
echo "Slurm: the report of the epilog names rank 2"

section=compose
cd deploy/compose
run "$(sed -n 's/^#   //p' compose.yaml)"
cd ../..
run "$(sed -n '1s/^.*: //p' deploy/compose/compose.yaml)"
echo "every command of the pages ran"
