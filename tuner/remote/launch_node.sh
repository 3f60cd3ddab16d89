port=${RAY_PORT:-6379}
# Ray takes a number for the address of a node.
HEAD=$(python -c 'import socket, sys; print(socket.gethostbyname(sys.argv[1]))' "$HEAD")
# With a token on it, a head wants one of everybody; the others send it only when they are told to.
if [ -e ~/.ray/auth_token ]; then export RAY_AUTH_MODE=${RAY_AUTH_MODE:-token}; fi
# Another `ray` may be the first on PATH. What follows the name of this script goes to `ray start`.
ray_start=(python -m ray.scripts.scripts start --block --num-cpus @cpus@ --num-gpus @gpus@ --disable-usage-stats "$@")

is_head_up() { (: < "/dev/tcp/$HEAD/$port") 2> /dev/null; }
# Its children end with `ray start --block`.
start_node() {
  "${ray_start[@]}" "$@" &
  node=$!
  trap 'kill "$node" 2> /dev/null || true; wait "$node" || true' EXIT
}

if [ "$NODE_RANK" != 0 ]; then
  until is_head_up; do
    [ "$SECONDS" -lt 600 ] || { echo "node 0 ($HEAD:$port) could not be reached for 10 minutes" >&2; exit 3; }
    sleep 2
  done
  trap 'exit 143' INT TERM
  # Joins, and joins again where it is lost, for as long as there is a head.
  while is_head_up; do
    kill -0 "${node:-none}" 2> /dev/null || start_node --address "$HEAD:$port"
    sleep 2
  done
  exit 0
fi

# A node that has to go tells the others; with the head they go as well.
export RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0
start_node --head --node-ip-address "$HEAD" --port "$port"
until is_head_up; do
  kill -0 "$node"
  sleep 1
done
python -m tuner.remote.wait_for_nodes "$HEAD:$port" @nodes@
@run@ --address "$HEAD:$port" &
study=$!
# A signal ends the first wait, while the trials are still saving.
trap 'kill -TERM "$study"' INT TERM
wait "$study" || wait "$study"
