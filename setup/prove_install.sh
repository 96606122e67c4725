#!/usr/bin/env bash
# Installs the files of a dist folder outside the checkout and runs the first commands of a user with each:
# prove_install.sh DIST RESULT. Writes size in bytes, seconds to the first verdict and exit codes as JSON. Needs root.
# The deb needs debootstrap, the images need buildah; without these programs their rows are left out.
set -euo pipefail
dist=$(realpath "$1") result=$(realpath -m "$2") setup=$(realpath "$(dirname "$0")")
commit=$(git describe --always --dirty --abbrev=12)
shopt -s nullglob # a file that was not built has no row
scratch=$(mktemp -d)
chroot=$scratch/chroot
cleanup() {
	for folder in proc sys; do mountpoint -q "$chroot/$folder" && umount "$chroot/$folder"; done
	rm -rf "$scratch"
}
trap cleanup EXIT
cd "$scratch"
unset PYTHONPATH
caps=(BPF PERFMON SYS_PTRACE DAC_READ_SEARCH CHECKPOINT_RESTORE)

rows=()
try() { # try NAME FILE FOLDER COMMAND...: the first minute. FOLDER: for the trace, as the command names it
	name=$1 file=$2 folder=$3
	shift 3
	begin=$(date +%s.%N)
	"$@" demo >demo.txt
	seconds=$(python3 -c "import time; print(round(time.time() - $begin, 1))")
	grep -q '^Rank 2' demo.txt
	"$@" --version
	"$@" demo --live --db "$folder/$name.db" >live.txt 2>live.err || { tail -n 3 live.err >&2; return 1; }
	grep -q '^Rank 2' live.txt
	explained=0
	"$@" explain --db "$folder/$name.db" >explain.txt || explained=$?
	grep -q '^Rank 2' explain.txt
	checked=0
	"$@" check >check.txt || checked=$?
	rows+=("{\"artefact\": \"$name\", \"bytes\": $(stat -c %s "$file"), \"first_verdict_s\": $seconds, \"explain_exit\": $explained, \"check_exit\": $checked}")
	echo "$name: first verdict after $seconds s; demo, demo --live, explain and check ran"
}

python3 -m venv wheel
wheel/bin/pip --quiet --disable-pip-version-check install "$dist"/*.whl
try wheel "$dist"/*.whl "$scratch" wheel/bin/stallscope

# A user without root, with exactly the five capabilities and no way to get more.
five=-all$(printf ',+%s' "${caps[@],,}")
chmod 755 "$scratch"
install -d -o 65534 -g 65534 "$scratch/nobody"
try wheel-uid-65534 "$dist"/*.whl "$scratch/nobody" env HOME="$scratch/nobody" setpriv --reuid 65534 --regid 65534 --clear-groups \
	--no-new-privs --inh-caps "$five" --ambient-caps "$five" --bounding-set "$five" "$scratch/wheel/bin/stallscope"

clean=(env -i PATH="$PATH" SHIV_ROOT="$scratch/shiv" XDG_CACHE_HOME="$scratch/cache")
for file in "$dist"/*.pyz; do
	try pyz "$file" "$scratch" "${clean[@]}" "$file"
done
file=$dist/stallscope-$(uname -m)
if [ -f "$file" ]; then try own-python "$file" "$scratch" "${clean[@]}" "$file"; fi

debs=("$dist"/*.deb)
if command -v debootstrap >/dev/null && [ ${#debs[@]} = 1 ]; then
	archive=$(apt-get --print-uris update 2>/dev/null | sed -n "s|^'\(.*/debian/\)dists/.*|\1|p" | head -1)
	debootstrap --variant=minbase bookworm "$chroot" "$archive" >debootstrap.log 2>&1 || { tail -n 2 debootstrap.log >&2; exit 1; }
	cp "$dist"/*.deb "$chroot/tmp/stallscope.deb"
	mount -t proc proc "$chroot/proc"
	chroot "$chroot" dpkg -i /tmp/stallscope.deb >/dev/null
	! chroot "$chroot" sh -c 'command -v python3 gcc' # neither Python nor a compiler
	hidden=0
	chroot "$chroot" stallscope check >check.txt || hidden=$?
	grep -q 'action: mount it' check.txt && [ $hidden = 5 ]
	mount -t sysfs sysfs "$chroot/sys"
	try deb "$dist"/*.deb /var/lib/stallscope chroot "$chroot" stallscope
	echo '# changed' >>"$chroot/etc/stallscope/settings.yaml"
	chroot "$chroot" dpkg -i /tmp/stallscope.deb >/dev/null
	tail -n 1 "$chroot/etc/stallscope/settings.yaml" | grep -q '^# changed' # an upgrade keeps the settings
fi

image() { # image NAME COMMAND...: runs a command in the image with exactly the five capabilities and the seccomp profile
	container=$1
	shift
	dropped=()
	for each in AUDIT_WRITE CHOWN DAC_OVERRIDE FOWNER FSETID KILL MKNOD NET_BIND_SERVICE NET_RAW SETFCAP SETGID SETPCAP SETUID SYS_CHROOT; do
		dropped+=(--cap-drop "CAP_$each")
	done
	buildah --storage-driver vfs run "${dropped[@]}" "${caps[@]/#/--cap-add=CAP_}" --isolation chroot "$container" -- stallscope "$@"
}
if command -v buildah >/dev/null && [ -f "$dist/agent.tar" ]; then
	profile=$setup/../deploy/seccomp/stallscope-agent.json
	container=$(buildah --storage-driver vfs from --quiet --security-opt "seccomp=$profile" "oci-archive:$dist/agent.tar")
	try image-agent "$dist/agent.tar" /tmp image "$container"
	buildah --storage-driver vfs rm "$container" >/dev/null
fi
if command -v buildah >/dev/null && [ -f "$dist/hub.tar" ]; then
	container=$(buildah --storage-driver vfs from --quiet "oci-archive:$dist/hub.tar")
	buildah --storage-driver vfs run --isolation chroot "$container" -- stallscope hub quickstart --db /tmp/hub >hub.txt
	buildah --storage-driver vfs run --isolation chroot "$container" -- stallscope demo | grep -q '^Rank 2'
	rows+=("{\"artefact\": \"image-hub\", \"bytes\": $(stat -c %s "$dist/hub.tar")}")
	buildah --storage-driver vfs rm "$container" >/dev/null
fi
for file in "$dist"/*.rpm "$dist"/*.apk; do
	rows+=("{\"artefact\": \"${file##*.}\", \"bytes\": $(stat -c %s "$file")}")
done
(IFS=,; printf '{"commit": "%s", "python": "%s", "artefacts": [%s]}\n' "$commit" "$(python3 -V)" "${rows[*]}") | python3 -m json.tool >"$result"
