# Sourced by scripts that download from another Debian release: setup/python.sh, setup/kernels.sh, setup/program.sh.
#
#   look_into RELEASE    apt-get and apt-cache use only that release afterwards; false with $why on failure
#
# apt then has separate state in the current folder: package lists, an empty list of installed packages, and downloads.
# The machine's own state is unchanged, and no privileges are needed. leave_release removes the separate state.

look_into() {
    for tool in apt-get dpkg tar; do
        command -v $tool >/dev/null || { why="no $tool"; return 1; }
    done
    # The address comes from apt's settings, which exist before any list has been downloaded.
    archive=$(apt-get --print-uris update 2>/dev/null | sed -n "s|^'\(.*/debian/\)dists/.*|\1|p" | head -1)
    if [ -z "$archive" ]; then
        why="apt has no Debian archive in its settings"
        return 1
    fi
    mkdir -p lists/partial archives/partial
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $archive $1 main" >sources.list
    : >status
    cat >apt.conf <<END
Dir::Etc::sourcelist "$PWD/sources.list";
Dir::Etc::sourceparts "-";
Dir::State::lists "$PWD/lists";
Dir::State::status "$PWD/status";
Dir::Cache "$PWD";
APT::Sandbox::User "root";
APT::Update::Error-Mode "any";
Acquire::Retries "2";
Acquire::http::Timeout "30";
END
    export APT_CONFIG="$PWD/apt.conf"
    fetched apt-get -qq update
}

# fetched COMMAND...: runs it; on failure false, with the last line of its output in $why.
fetched() {
    "$@" >log 2>&1 && return 0
    why=$(tail -1 log)
    return 1
}

leave_release() {
    unset APT_CONFIG
    rm -rf lists archives ./*.bin ./*.deb apt.conf sources.list status log
}
