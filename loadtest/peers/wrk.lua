-- Sends the requests that lie in the files named after `--`, in turn, and reports on stderr as one line of JSON.
-- No `response` function: with one, wrk would parse and copy every answer.
local requests = {}
local turn = 0

function init(files)
  for _, name in ipairs(files) do
    local file = assert(io.open(name, "rb"))
    requests[#requests + 1] = file:read("*a")
    file:close()
  end
end

function request()
  turn = turn + 1
  return requests[turn % #requests + 1]
end

function done(summary, latency, _)
  local errors = summary.errors
  io.stderr:write(string.format(
    '{"duration_us":%d,"requests":%d,"p50_us":%d,"p99_us":%d,"status":%d,"connect":%d,"read":%d,"write":%d,"timeout":%d}\n',
    summary.duration, summary.requests, latency:percentile(50), latency:percentile(99),
    errors.status, errors.connect, errors.read, errors.write, errors.timeout))
end
