#!/usr/bin/env bash
# Installs the files of a dist folder outside the checkout and runs the first commands of a user with each:
# prove_install.sh DIST RESULT [PART...]. PART: wheel, file, deb, rpm, apk, python, agent, hub; without it all.
# Writes size in bytes, seconds to the first verdict and exit codes as JSON. Needs root.
# Empty machines need debootstrap, the images need buildah; without these programs their rows are left out. The apk needs
# apk (or APK=/path/to/apk) and busybox; without apk only its files are tried.
set -euo pipefail
dist=$(realpath "$1") result=$(realpath -m "$2") setup=$(realpath "$(dirname "$0")")
commit=$(cat "$dist/COMMIT") # of the files
shopt -s nullglob # a file that was not built has no row
scratch=$(mktemp -d)
cleanup() {
	for folder in "$scratch"/*/proc "$scratch"/*/sys; do ! mountpoint -q "$folder" || umount "$folder"; done
	rm -rf --one-file-system "$scratch"
}
trap cleanup EXIT
cd "$scratch"
unset PYTHONPATH
parts=${*:3}
parts=" ${parts:-wheel file deb rpm apk python agent hub} "
inside=
verdict='^(\[[0-9]+/[0-9]+\] )?Rank 2 \(host'
caps=(BPF PERFMON SYS_PTRACE DAC_READ_SEARCH CHECKPOINT_RESTORE)

row() { # row NAME FILE MORE: one row of the result
	python3 "$setup/install_row.py" "$result" "$commit" "{\"artefact\": \"$1\", \"commit\": \"$commit\", \"bytes\": $(stat -L -c %s "$2"), \"load\": $(cut -d ' ' -f 1 /proc/loadavg)$3}"
}
wants() { # wants PART...: whether one of the parts was chosen
	for part in "$@"; do
		[[ $parts != *" $part "* ]] || return 0
	done
	return 1
}
at_most() { # at_most MEGABYTES FILE
	[ "$(stat -L -c %s "$2")" -le $(($1 * 1000000)) ] || { echo "prove: $2 is larger than $1 MB" >&2; exit 1; }
}
machine() { # machine RELEASE FOLDER [PACKAGE,...]: an empty Debian without a compiler
	archive=$(apt-get --print-uris update 2>/dev/null | sed -n "s|^'\(.*/debian/\)dists/.*|\1|p" | head -1)
	debootstrap --variant=minbase ${3:+--include=$3} "$1" "$2" "$archive" >debootstrap.log 2>&1 || { tail -n 2 debootstrap.log >&2; exit 1; }
	mount -t proc proc "$2/proc"
	absent "$2" gcc cc clang
}
absent() { # absent ROOT PROGRAM...: fails if the machine has one of the programs
	for program in "${@:2}"; do
		if chroot "$1" sh -c "command -v $program"; then echo "prove: $1 has $program" >&2; exit 1; fi
	done
}
present() { # present FILE: it is there, and not empty
	[ -s "$1" ] || { echo "prove: $1 is missing" >&2; exit 1; }
}
libraries() { # libraries COMMAND...: both libraries that jobs load are present. inside: the root of the machine
	plugin=$("$@" plugin path)
	plugin=$inside${plugin#NCCL_PROFILER_PLUGIN=}
	for library in "$plugin" "${plugin%/*}/libstallscope-look.so"; do
		present "$library"
	done
}
alpine() { # alpine FOLDER: as much of Alpine as its package manager and a script of a package need
	mkdir -p "$1"/{bin,dev/shm,etc,proc,root,sys,tmp,var/lib}
	cp "$(command -v busybox)" "$1/bin/busybox"
	chroot "$1" /bin/busybox --install -s /bin
	echo 'root:x:0:0:root:/root:/bin/sh' >"$1/etc/passwd"
	echo 'root:x:0:' >"$1/etc/group"
	echo 'ID=alpine' >"$1/etc/os-release"
	mknod -m 666 "$1/dev/null" c 1 3
	mount -t proc proc "$1/proc"
	mount -t sysfs sysfs "$1/sys"
}
try() { # try NAME FILE FOLDER COMMAND...: the first minute. FOLDER: for the trace, as the command names it
	name=$1 file=$2 folder=$3
	shift 3
	begin=$(date +%s.%N)
	first=0
	"$@" demo >demo.txt || first=$?
	seconds=$(python3 -c "import time; print(round(time.time() - $begin, 1))")
	grep -qE "$verdict" demo.txt
	"$@" --version
	libraries "$@"
	for attempt in 1 2 3; do # a busy machine may attach too late; each rerun is printed
		live=0
		"$@" demo --live --db "$folder/$name-$attempt.db" >live.txt 2>live.err || live=$?
		[ "$live" != 0 ] || break
		echo "$name: demo --live, attempt $attempt: $(tail -n 1 live.err)" >&2
	done
	[ "$live" = 0 ]
	grep -qE "$verdict" live.txt
	explained=0
	"$@" explain --db "$folder/$name-$attempt.db" >explain.txt || explained=$?
	grep -qE "$verdict" explain.txt
	checked=0
	"$@" check >check.txt || checked=$?
	[ "$explained" = 20 ]
	row "$name" "$file" ", \"first_verdict_s\": $seconds, \"demo_exit\": $first, \"demo_live_exit\": $live, \"explain_exit\": $explained, \"check_exit\": $checked"
	echo "$name: first verdict after $seconds s; demo, demo --live, explain and check ran"
}

if wants wheel hub; then
	python3 -m venv wheel
	wheel/bin/pip --quiet --disable-pip-version-check install "$dist"/*.whl
fi
if wants wheel; then
	try wheel "$dist"/*.whl "$scratch" wheel/bin/stallscope

	# A user without root, with exactly the five capabilities and no way to get more.
	five=-all$(printf ',+%s' "${caps[@],,}")
	chmod 755 "$scratch"
	install -d -o 65534 -g 65534 "$scratch/nobody"
	try wheel-uid-65534 "$dist"/*.whl "$scratch/nobody" env HOME="$scratch/nobody" setpriv --reuid 65534 --regid 65534 --clear-groups \
		--no-new-privs --inh-caps "$five" --ambient-caps "$five" --bounding-set "$five" "$scratch/wheel/bin/stallscope"

	# The same under the seccomp profile of the container.
	try wheel-seccomp "$dist"/*.whl "$scratch/nobody" env HOME="$scratch/nobody" python3 "$setup/seccomp_exec.py" "$setup/../deploy/seccomp/stallscope-agent.json" \
		setpriv --reuid 65534 --regid 65534 --clear-groups --no-new-privs --inh-caps "$five" --ambient-caps "$five" --bounding-set "$five" \
		"$scratch/wheel/bin/stallscope"
fi
if wants file; then
	clean=(env -i PATH="$PATH" SHIV_ROOT="$scratch/shiv" XDG_CACHE_HOME="$scratch/cache")
	for file in "$dist"/*.pyz; do
		try pyz "$file" "$scratch" "${clean[@]}" "$file"
		present "$scratch"/shiv/*/site-packages/pynvml.py
	done
	file=$dist/stallscope-$(uname -m)
	if [ -f "$file" ]; then
		try own-python "$file" "$scratch" "${clean[@]}" "$file"
		present "$scratch"/cache/stallscope/own-*/packages/pynvml.py
	fi
fi

file=("$dist"/*.deb)
apk=${APK:-$(command -v apk || true)}
if { wants deb rpm || { wants apk && [ -z "$apk" ]; }; } && command -v debootstrap >/dev/null; then
	root=$scratch/bookworm inside=$scratch/bookworm
	machine bookworm "$root" rpm
fi
if wants deb && [ -n "$inside" ] && [ ${#file[@]} = 1 ]; then
	cp "$file" "$root/tmp/stallscope.deb"
	chroot "$root" dpkg -i /tmp/stallscope.deb >/dev/null
	absent "$root" python3
	present "$root/usr/lib/stallscope/packages/pynvml.py"
	hidden=0
	chroot "$root" stallscope check >check.txt || hidden=$?
	grep -q 'action: mount it' check.txt && [ $hidden = 5 ]
	mount -t sysfs sysfs "$root/sys"
	try deb "$file" /var/lib/stallscope chroot "$root" stallscope
	echo '# changed' >>"$root/etc/stallscope/settings.yaml"
	chroot "$root" dpkg -i /tmp/stallscope.deb >/dev/null
	tail -n 1 "$root/etc/stallscope/settings.yaml" | grep -q '^# changed' # an upgrade keeps the settings
	chroot "$root" dpkg --purge stallscope >/dev/null 2>&1
	[ ! -e "$root/usr/lib/stallscope" ]
fi
if [ -n "$inside" ] && ! mountpoint -q "$root/sys"; then
	mount -t sysfs sysfs "$root/sys"
fi
if wants rpm && [ -n "$inside" ]; then
	for file in "$dist"/*.rpm; do
		cp "$file" "$root/tmp/stallscope.rpm"
		chroot "$root" rpm --install --force-debian --nodeps /tmp/stallscope.rpm
		present "$root/usr/lib/stallscope/packages/pynvml.py"
		try rpm "$file" /var/lib/stallscope chroot "$root" stallscope
		chroot "$root" rpm --erase --force-debian stallscope
	done
fi
if wants apk && [ -n "$apk$inside" ]; then
	for file in "$dist"/*.apk; do
		if [ -z "$apk" ]; then # its files alone, without the scripts
			tar -xzf "$file" -C "$root" usr etc 2>/dev/null
			try apk-unpacked "$file" /var/lib/stallscope chroot "$root" stallscope
			continue
		fi
		root=$scratch/alpine inside=$scratch/alpine
		alpine "$root"
		manage=("$apk" --root "$root" --arch "$(uname -m)" --no-network --allow-untrusted)
		"${manage[@]}" --initdb add "$file" >/dev/null
		present "$root/usr/lib/stallscope/packages/pynvml.py"
		try apk "$file" /var/lib/stallscope chroot "$root" stallscope
		grep -q 'apk add' check.txt # the remedies are those of this distribution
		echo '# changed' >>"$root/etc/stallscope/settings.yaml"
		"${manage[@]}" add --force-overwrite "$file" >/dev/null
		tail -n 1 "$root/etc/stallscope/settings.yaml" | grep -q '^# changed'
		"${manage[@]}" del stallscope >/dev/null
		[ ! -e "$root/usr/lib/stallscope" ]
	done
fi
if wants python && command -v debootstrap >/dev/null; then
	for release in bookworm trixie; do # Debian has no release with Python 3.12
		root=$scratch/python-$release inside=$scratch/python-$release
		machine "$release" "$root" python3
		mount -t sysfs sysfs "$root/sys"
		version=$(chroot "$root" python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
		for file in "$dist"/*.pyz; do
			cp "$file" "$root/usr/local/bin/stallscope"
			try "pyz-python-$version" "$file" /tmp chroot "$root" stallscope
		done
	done
fi
inside=

image() { # image NAME COMMAND...: runs a command in the image with exactly the five capabilities and the seccomp profile
	container=$1
	shift
	dropped=()
	for each in AUDIT_WRITE CHOWN DAC_OVERRIDE FOWNER FSETID KILL MKNOD NET_BIND_SERVICE NET_RAW SETFCAP SETGID SETPCAP SETUID SYS_CHROOT; do
		dropped+=(--cap-drop "CAP_$each")
	done
	buildah --storage-driver vfs run "${dropped[@]}" "${caps[@]/#/--cap-add=CAP_}" --isolation chroot "$container" -- stallscope "$@"
}
if wants agent && command -v buildah >/dev/null && [ -f "$dist/agent.tar" ]; then
	(cd "$dist" && sha256sum --check --quiet SHA256SUMS && grep -q ' agent.tar$' SHA256SUMS)
	at_most 60 "$dist/agent.tar"
	profile=$setup/../deploy/seccomp/stallscope-agent.json
	container=$(buildah --storage-driver vfs from --quiet --security-opt "seccomp=$profile" "oci-archive:$dist/agent.tar")
	inside=$(buildah --storage-driver vfs mount "$container")
	present "$inside/usr/lib/stallscope/packages/pynvml.py"
	try image-agent "$dist/agent.tar" /tmp image "$container"
	buildah --storage-driver vfs rm "$container" >/dev/null
fi
hub() { # hub COMMAND...: runs a command in the image of the hub, as its user
	buildah --storage-driver vfs run --isolation chroot "$container" -- stallscope "$@"
}
if wants hub && command -v buildah >/dev/null && [ -f "$dist/hub.tar" ]; then
	at_most 180 "$dist/hub.tar"
	container=$(buildah --storage-driver vfs from --quiet "oci-archive:$dist/hub.tar")
	inside=$(buildah --storage-driver vfs mount "$container")
	libraries hub
	begin=$(date +%s.%N)
	hub hub quickstart --db /tmp/hub --name localhost >hub.txt
	files=$(buildah --storage-driver vfs mount "$container")/tmp/hub
	hub hub --db /tmp/hub --tls-cert /tmp/hub/tls/hub.crt --tls-key /tmp/hub/tls/hub.key \
		--otlp-grpc 127.0.0.1:14317 --otlp-http 127.0.0.1:14318 --api 127.0.0.1:18081 >hub.log 2>&1 &
	server=$!
	for _ in $(seq 120); do ! grep -q ready hub.log || break; sleep 1; done
	"$dist/stallscope-$(uname -m)" trace --quiet --db "$scratch/sent.db" --hub localhost:14317 --token-file "$files/ingest.token" \
		--ca-cert "$files/tls/hub.crt" -- wheel/bin/python "$setup/live_job.py" sleep 20 "$scratch/trace.txt" >trace.txt 2>&1
	asked=()
	for _ in $(seq 60); do # the verdict follows the data by a few seconds
		hub ask verdicts --hub https://localhost:18081 --token-file /tmp/hub/read.token --ca-cert /tmp/hub/tls/hub.crt >asked.txt 2>&1 || true
		if grep -q 'Rank 2' asked.txt; then asked=(yes); break; fi
		sleep 2
	done
	[ "${asked[*]}" = yes ] || { tail -n 5 hub.log trace.txt asked.txt >&2; exit 1; }
	seconds=$(python3 -c "import time; print(round(time.time() - $begin, 1))")
	kill -TERM "$(pgrep -n -f -- '--api 127.0.0.1:18081')" # the hub itself, in the container
	stopped=0
	wait "$server" || stopped=$?
	row image-hub "$dist/hub.tar" ", \"first_verdict_s\": $seconds, \"stop_exit\": $stopped"
	echo "image-hub: takes data of an agent and answers; first verdict after $seconds s, 20 s of them the job"
	buildah --storage-driver vfs rm "$container" >/dev/null
fi
