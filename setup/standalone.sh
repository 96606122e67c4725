#!/usr/bin/env bash
# Builds the file with its own Python: standalone.sh BIN DIST. It unpacks itself on its first run, once per version, into
# $XDG_CACHE_HOME/stallscope, /var/cache/stallscope (root) or ~/.cache/stallscope. The target needs sh, tar and gzip.
set -euo pipefail
bin=$1 dist=$2
tree=build/standalone/tree file=$dist/stallscope-$(uname -m)
rm -rf build/standalone
mkdir -p build/standalone
"$bin/python" setup/own_python.py "$tree" "$(ls "$dist"/*.whl)" export,gpu
tar --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner -cf - -C "$tree" . | gzip -9n >build/standalone/tree.tar.gz
name=$(sha256sum build/standalone/tree.tar.gz | cut -c1-16)
cat >"$file" <<END
#!/bin/sh
# stallscope with its own Python; the archive begins after the line "__ARCHIVE__".
if [ -n "\${XDG_CACHE_HOME:-}" ]; then cache=\$XDG_CACHE_HOME
elif [ "\$(id -u)" = 0 ]; then cache=/var/cache
else cache=\$HOME/.cache
fi
home=\$cache/stallscope/own-$name
if [ ! -x "\$home/bin/stallscope" ]; then
    mkdir -p "\$cache/stallscope" && new=\$(mktemp -d "\$cache/stallscope/new-XXXXXX") ||
        { echo "stallscope: cannot write \$cache/stallscope; set XDG_CACHE_HOME" >&2; exit 4; }
    lines=\$(sed -n '/^__ARCHIVE__\$/{=;q}' "\$0")
    tail -n +\$((lines + 1)) "\$0" | tar -xz -C "\$new" ||
        { echo "stallscope: cannot unpack into \$new; make room, or set XDG_CACHE_HOME" >&2; rm -rf "\$new"; exit 4; }
    chmod 755 "\$new"
    mv -T "\$new" "\$home" 2>/dev/null || rm -rf "\$new"
fi
[ -O "\$home" ] || { echo "stallscope: \$home belongs to another user; remove it" >&2; exit 4; }
exec "\$home/bin/stallscope" "\$@"
__ARCHIVE__
END
cat build/standalone/tree.tar.gz >>"$file"
chmod 755 "$file"
