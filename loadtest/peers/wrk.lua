-- Sends the requests that lie in the files named after `--`, in turn, and reports on stderr as one line of JSON.
-- Where a request has the mark of forms.py, another number stands in its place each time, in this run and in all others.
-- No `response` function: with one, wrk would parse and copy every answer.
local mark = string.rep("#", 16)
local requests = {}
local turn = os.time() * 1000000

function init(files)
  for _, name in ipairs(files) do
    local file = assert(io.open(name, "rb"))
    local text = file:read("*a")
    local at = text:find(mark, 1, true)
    requests[#requests + 1] = at and { text:sub(1, at - 1), text:sub(at + #mark) } or text
    file:close()
  end
end

function request()
  turn = turn + 1
  local chosen = requests[turn % #requests + 1]
  if type(chosen) == "string" then
    return chosen
  end
  return chosen[1] .. string.format("%016.0f", turn) .. chosen[2]
end

function done(summary, latency, _)
  local errors = summary.errors
  io.stderr:write(string.format(
    '{"duration_us":%d,"requests":%d,"p50_us":%d,"p99_us":%d,"status":%d,"connect":%d,"read":%d,"write":%d,"timeout":%d}\n',
    summary.duration, summary.requests, latency:percentile(50), latency:percentile(99),
    errors.status, errors.connect, errors.read, errors.write, errors.timeout))
end
