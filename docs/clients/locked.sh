#!/bin/sh
# Runs a command while it holds a lock that Django's processes hold and honour too. No Python.
#
#     locked.sh postgresql nightly ./backup.sh --all
#     locked.sh mariadb nightly ./backup.sh --all
#
# psql finds its database by PGHOST, PGDATABASE and so on; mariadb by the options in MARIADB_OPTIONS.
# KIND (mutex), SLOTS (1), LEASE (60 seconds) and TIMEOUT (30 seconds; 0 tries once) may be set before.
# Ends with the command's exit code; 75 if the lock was not free in time, 76 if it was lost meanwhile.
set -u
DATABASE=$1 NAME=$2
shift 2
HERE=$(dirname "$0")
KIND=${KIND:-mutex} SLOTS=${SLOTS:-1} LEASE=${LEASE:-60} TIMEOUT=${TIMEOUT:-30}
TICKET=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
WAIT=$((TIMEOUT > 0))

quoted() { printf "'%s'" "$(printf %s "$1" | sed "s/[\\\\']/\\\\&/g")"; }

sql() { # A server that does not answer must not keep us from noticing that the lease runs out.
    case $DATABASE in
    postgresql)
        timeout "$((LEASE / 4 + 1))" psql -XqAt -v ON_ERROR_STOP=1 -v name="$NAME" -v kind="$KIND" -v slots="$SLOTS" \
            -v lease="$LEASE" -v ticket="$TICKET" -v wait="$WAIT" -v host="$(uname -n)" -f "$HERE/postgresql/$1.sql" ;;
    mariadb)
        { printf 'SET @name = %s, @kind = %s, @slots = %d, @lease = %d, @ticket = %s, @wait = %d, @host = %s;\n' \
            "$(quoted "$NAME")" "$(quoted "$KIND")" "$SLOTS" "$LEASE" "$(quoted "$TICKET")" "$WAIT" \
            "$(quoted "$(uname -n)")"
          cat "$HERE/mariadb/$1.sql"; } |
            # shellcheck disable=SC2086 - these are several words
            timeout "$((LEASE / 4 + 1))" mariadb -N -B --default-character-set=utf8mb4 ${MARIADB_OPTIONS:-} ;;
    esac
}

give_up() {
    sql release >/dev/null
    echo "$1" >&2
    exit "$2"
}
trap 'give_up "Interrupted." 130' INT TERM

until_when=$(($(date +%s) + TIMEOUT))
while :; do
    asked=$(date +%s)
    answer=$(sql take) || answer="no answer" # a deadlock, or no connection: what was granted all the same is found
    case $answer in
    held*) break ;;
    wrong*) give_up "$NAME: $answer" 64 ;;
    esac
    [ "$(date +%s)" -lt "$until_when" ] || give_up "$NAME: $answer" 75
    sleep 0.4
done

# The command starts; beside it the lease is renewed, and if that fails for too long the command is ended.
lost=0
trap 'lost=1' USR1
SLOT_AND_TOKEN=${answer#held } "$@" &
work=$!
{
    proven=$asked
    while sleep "$((LEASE / 4))"; do
        asked=$(date +%s)
        case $(sql renew) in
        held) proven=$asked ;;
        lost) break ;;
        esac
        [ $(($(date +%s) - proven)) -lt $((LEASE * 3 / 4)) ] || break
    done
    kill -USR1 $$ # before the end of the command wakes us
    kill -TERM "$work"
} >/dev/null 2>&1 &
keeper=$!
trap 'kill -TERM "$work"' INT TERM

wait "$work"
code=$?
while kill -0 "$work" 2>/dev/null; do # a signal to us ended the wait
    wait "$work"
    code=$?
done
kill -KILL "$keeper" 2>/dev/null # not TERM: a shell that has only just been forked may miss that
wait "$keeper" 2>/dev/null
[ "$lost" -eq 0 ] || { echo "$NAME was lost." >&2; code=76; }
sql release >/dev/null
exit "$code"
