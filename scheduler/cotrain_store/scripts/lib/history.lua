-- history: one point for each optimizer step and evaluation of a run, written with the commit of their ops.
-- Of n points a list keeps those numbered 1, 1 + s, 1 + 2s, … and n, for the smallest power of two `s` that
-- keeps at most 1,024. The kept points therefore depend on n alone, and a kept point never changes.
-- Numbers are packed (`tenants/history.py`): as text, Lua would write 14 digits of them.
local POINT, STATE, POINTS = '<I4I4I8dddddI8I8I4', '<' .. ('d'):rep(29), 1024
-- Drift of policy losses, and lag of policies: sums over tokens, except for the maxima.
local DRIFT = { 'sampled', 'gap', 'gap_max', 'effective', 'bounded', 'clipped' }
local LAG = { 'lagged', 'lag', 'lag_max' }
local MAX_STRUCK_OFF = 100 -- maximum number of histories deleted by one commit

local function stride_of(number)
  local stride = 1
  while number - 1 > (POINTS - 1) * stride do
    stride = stride * 2
  end
  return stride
end

local function number_of(point)
  return (struct.unpack('<I4', point)) -- drops the end position, the second result
end

-- Keep only the points of a stride. Returns the change of the number of points, which is negative or 0.
local function thin(list, stride)
  local points, kept = redis.call('LRANGE', list, 0, -1), {}
  for _, point in ipairs(points) do
    if (number_of(point) - 1) % stride == 0 then
      kept[#kept + 1] = point
    end
  end
  redis.call('DEL', list)
  if #kept > 0 then
    redis.call('RPUSH', list, unpack(kept))
  end
  return #kept - #points
end

-- Write or replace the point of this number. Returns the change of the number of points.
local function write_point(list, number, point)
  local more, stride = 0, stride_of(number)
  if stride > stride_of(number - 1) then
    more = thin(list, stride)
  end
  local last = redis.call('LINDEX', list, -1)
  if last and (number_of(last) == number or (number_of(last) - 1) % stride > 0) then
    redis.call('LSET', list, -1, point)
    return more
  end
  redis.call('RPUSH', list, point)
  return more + 1
end

-- Points of a tenant's own metrics (`messages/runs.py`). A value is a sum divided by a weight.
local METRIC = '<I4I4I8ddd'

local function metric_lists(run)
  local lists = {}
  for _, name in ipairs(redis.call('HKEYS', 'cotrain:run:' .. run .. ':metrics')) do
    lists[#lists + 1] = 'cotrain:run:' .. run .. ':metric:' .. name
  end
  return lists
end

local function points_of(run)
  return 'cotrain:run:' .. run .. ':steps', 'cotrain:run:' .. run .. ':evaluations'
end

local function no_passes()
  local none = { loss = 0, weight = 0, tokens = 0, passes = 0 }
  for _, names in ipairs({ DRIFT, LAG }) do
    for _, name in ipairs(names) do
      none[name] = 0
    end
  end
  return none
end

-- Unpack the number of points, the tokens of passes with a gradient, and the sums since the last optimizer step: of
-- passes with a gradient, and of forwards.
local function parse_history(packed)
  if not packed then
    return { steps = 0, evaluations = 0, run_tokens = 0, trained = no_passes(), evaluated = no_passes() }
  end
  local n = { struct.unpack(STATE, packed) }
  local history = {
    steps = n[1], evaluations = n[2], run_tokens = n[3],
    trained = { loss = n[4], weight = n[5], tokens = n[6], passes = n[7] },
    evaluated = { loss = n[8], weight = n[9], tokens = n[10], passes = n[11] },
  }
  for at, name in ipairs(DRIFT) do
    history.trained[name], history.evaluated[name] = n[11 + at], n[17 + at]
  end
  for at, name in ipairs(LAG) do
    history.trained[name], history.evaluated[name] = n[23 + at], n[26 + at]
  end
  return history
end

local function packed_drift(sum)
  return struct.pack('<dddddd', sum.sampled, sum.gap, sum.gap_max, sum.effective, sum.bounded, sum.clipped)
end

local function packed_lag(sum)
  return struct.pack('<ddd', sum.lagged, sum.lag, sum.lag_max)
end

local function pack_history(history)
  local trained, evaluated = history.trained, history.evaluated
  return struct.pack('<ddddddddddd', history.steps, history.evaluations, history.run_tokens,
    trained.loss, trained.weight, trained.tokens, trained.passes,
    evaluated.loss, evaluated.weight, evaluated.tokens, evaluated.passes) ..
    packed_drift(trained) .. packed_drift(evaluated) .. packed_lag(trained) .. packed_lag(evaluated)
end

local function forget_passes(history)
  history.trained, history.evaluated = no_passes(), no_passes()
end

local function add_pass(sum, entry, tokens)
  sum.loss, sum.weight = sum.loss + entry.loss, sum.weight + entry.weight
  sum.tokens, sum.passes = sum.tokens + tokens, sum.passes + 1
  for _, name in ipairs(DRIFT) do
    local value = entry[name] or 0
    sum[name] = name == 'gap_max' and math.max(sum[name], value) or sum[name] + value
  end
  if (entry.lagged or 0) > 0 then
    sum.lag_max = sum.lagged > 0 and math.max(sum.lag_max, entry.lag_max) or entry.lag_max
    sum.lagged, sum.lag = sum.lagged + entry.lagged, sum.lag + entry.lag
  end
end

local function pack_point(number, history, seq, time_s, sum, entry)
  return struct.pack(POINT, number, history.steps, seq, time_s, sum.loss, sum.weight,
    entry.norm or 0, entry.rate or 0, sum.tokens, history.run_tokens, sum.passes) ..
    ((sum.sampled > 0 or sum.lagged > 0) and packed_drift(sum) or '') .. (sum.lagged > 0 and packed_lag(sum) or '')
end

-- Record a tenant's metrics. An evaluation has the forwards between its two ops. If some of them failed, or other
-- ops of the run came between, it has no value. Returns the change of the number of points.
local function record_metrics(history, run, seq, entry, time_s)
  local names, more = 'cotrain:run:' .. run .. ':metrics', 0
  local function add(name, sum, weight)
    local number = redis.call('HINCRBY', names, name, 1)
    local point = struct.pack(METRIC, number, history.steps, seq, time_s, sum, weight)
    more = more + write_point('cotrain:run:' .. run .. ':metric:' .. name, number, point)
  end
  for name, value in pairs(entry.values) do
    add(name, value, 1)
  end
  if entry.evaluation ~= '' then
    local found = history.evaluated
    if entry.passes > 0 and entry.passes == found.passes then
      add(entry.evaluation, found.loss, found.weight)
    end
    history.evaluated = no_passes()
  end
  return more
end

-- Return the fields of a checkpoint as JSON: its step, and the metrics since that step.
local function metrics_json(history, run)
  local found = {}
  for _, name in ipairs(redis.call('HKEYS', 'cotrain:run:' .. run .. ':metrics')) do
    local last = redis.call('LINDEX', 'cotrain:run:' .. run .. ':metric:' .. name, -1)
    if last then
      local _, step, _, _, sum, weight = struct.unpack(METRIC, last)
      if step == history.steps then
        local value = weight > 0 and sum / weight or sum
        found[#found + 1] = cjson.encode(name) .. ':' .. string.format('%.17g', value)
      end
    end
  end
  return string.format('"step":%.0f,"metrics":{%s}', history.steps, table.concat(found, ','))
end

-- Record the metrics of a finished op. Returns the change of the number of points.
local function record_entry(history, run, seq, entry, tokens, time_s)
  local steps, evaluations = points_of(run)
  if entry.values then
    return record_metrics(history, run, seq, entry, time_s)
  end
  if entry.norm then
    history.steps = history.steps + 1
    local point = pack_point(history.steps, history, seq, time_s, history.trained, entry)
    forget_passes(history)
    return write_point(steps, history.steps, point)
  elseif not entry.is_forward then
    history.run_tokens = history.run_tokens + tokens
    add_pass(history.trained, entry, tokens)
    return 0
  end
  if history.evaluated.passes == 0 then
    history.evaluations = history.evaluations + 1
  end
  add_pass(history.evaluated, entry, tokens)
  local point = pack_point(history.evaluations, history, seq, time_s, history.evaluated, entry)
  return write_point(evaluations, history.evaluations, point)
end

-- Count a tenant's points. Above its quota, the least recently extended histories are deleted.
local function count_points(tenant, run, more, time_s, quota)
  local counts, histories = 'cotrain:tenant:' .. tenant .. ':history', 'cotrain:tenant:' .. tenant .. ':histories'
  redis.call('ZADD', histories, time_s, run)
  local held = redis.call('HINCRBY', counts, 'points', more)
  if more <= 0 then
    return
  end
  local most = tonumber(redis.call('HGET', counts, 'quota') or quota)
  for _ = 1, MAX_STRUCK_OFF do
    local oldest = held > most and redis.call('ZRANGE', histories, 0, 0)[1]
    if not oldest or oldest == run then
      return
    end
    local steps, evaluations = points_of(oldest)
    local points = redis.call('LLEN', steps) + redis.call('LLEN', evaluations)
    for _, list in ipairs(metric_lists(oldest)) do
      points = points + redis.call('LLEN', list)
      redis.call('DEL', list)
    end
    redis.call('DEL', steps, evaluations, 'cotrain:run:' .. oldest .. ':metrics')
    redis.call('ZREM', histories, oldest)
    held = redis.call('HINCRBY', counts, 'points', 0 - points)
  end
end

-- Delete the points after an op. Returns the change of the number of points.
local function cut_points(run, seq)
  local more, lists = 0, metric_lists(run)
  lists[#lists + 1], lists[#lists + 2] = points_of(run)
  for _, list in ipairs(lists) do
    local last = redis.call('LINDEX', list, -1)
    while last and select(3, struct.unpack('<I4I4I8', last)) > seq do
      redis.call('RPOP', list)
      more = more - 1
      last = redis.call('LINDEX', list, -1)
    end
  end
  return more
end

-- Delete the points after an op, and reset the history to `packed`. Without `packed`, its counters continue.
local function cut_history(tenant, run, seq, packed)
  local key, more = 'cotrain:run:' .. run .. ':history', cut_points(run, seq)
  local history = parse_history(packed or redis.call('GET', key))
  forget_passes(history)
  redis.call('SET', key, pack_history(history))
  if more < 0 then
    redis.call('HINCRBY', 'cotrain:tenant:' .. tenant .. ':history', 'points', more)
  end
end
