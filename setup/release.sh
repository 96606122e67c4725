# Sourced by what fetches from another release of Debian than this machine's; see setup/python.sh, setup/kernels.sh.
#
#   look_into RELEASE    apt-get and apt-cache know that release, and it alone, from now on; false with $why if not
#
# apt has a world of its own then, in the current folder: its lists, its idea of what is installed (nothing), its
# downloads. Nothing of the machine's is touched, and no right is needed. leave_release takes the world away.

look_into() {
    for tool in apt-get dpkg tar; do
        command -v $tool >/dev/null || { why="no $tool"; return 1; }
    done
    # Where lists come from is told by the settings, so that it is known before any list was fetched.
    archive=$(apt-get --print-uris update 2>/dev/null | sed -n "s|^'\(.*/debian/\)dists/.*|\1|p" | head -1)
    if [ -z "$archive" ]; then
        why="apt knows no archive of Debian's"
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

# fetched COMMAND...: runs it; false with its last words in $why if it fails.
fetched() {
    "$@" >log 2>&1 && return 0
    why=$(tail -1 log)
    return 1
}

leave_release() {
    unset APT_CONFIG
    rm -rf lists archives ./*.bin ./*.deb apt.conf sources.list status log
}
