-- commit: make a step's effects visible: its results, `done`, and the end of its cycle, at once.
-- Fenced by the worker's epoch; an op counts only as the next one of its run. Twice is harmless.
-- (`0 - n`, not `-n`: Lua writes minus zero as '-0', which Redis does not take for an integer.)
local epoch_key, open, cycles, refs = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local notify, wake, counters = KEYS[5], KEYS[6], KEYS[7]
local starts, deaths = KEYS[8], KEYS[9]
local epoch, prefix, cycle, record, keep = ARGV[1], ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5])
local counted, numerics, saved, used = ARGV[6], ARGV[7], ARGV[8], ARGV[9]
local usage_ttl_s = ARGV[10]
local FIRST = 11 -- then, for each op: run, seq, tenant, tokens, size, ttl ms, result, what to release
                -- ('inline', a segment or ''), what to keep of its envelope instead ('' for all),
                -- and the bytes of the whole result

if redis.call('GET', epoch_key) ~= epoch then
  return 'FENCED'
end
if redis.call('HEXISTS', open, cycle) == 0 then
  return 'DONE'
end
-- Before anything is written: a script that fails undoes nothing.
local totals, saves, amounts = cjson.decode(counted), cjson.decode(saved), cjson.decode(used)
local done = {}
for i = FIRST, #ARGV, 10 do
  local run, seq = ARGV[i], tonumber(ARGV[i + 1])
  done[run] = done[run] or tonumber(redis.call('HGET', prefix .. 'log:' .. run, 'done'))
  if seq > done[run] + 1 then
    return 'ORDER'
  end
  done[run] = math.max(done[run], seq)
end

-- The request names the weights. A sampler refers to them at once; a name is only reserved, and the
-- result held back, until they are stored. False: the name is in use.
local function reserve(ref, seq, save, result, ttl_ms)
  local checkpoint = 'cotrain:checkpoint:' .. save.name
  local pending = checkpoint .. ':pending'
  if save.collision and redis.call('EXISTS', checkpoint, pending) > 0 then
    return false
  end
  redis.call('ZADD', pending, seq, ref)
  redis.call('SADD', 'cotrain:tenant:' .. save.tenant .. ':owed', ref)
  redis.call('HSET', 'cotrain:weights:' .. ref, 'checkpoint', save.user, 'result', result,
    'ttl', ttl_ms, 'last', save.last)
  return true
end

local function add_sampler(ref, save)
  if redis.call('SET', 'cotrain:sampler:' .. save.name, save.user, 'NX') then
    end_after('cotrain:sampler:' .. save.name, save.idle_ms)
    list_sampler(save.tenant, save.name, save.idle_ms)
    redis.call('SADD', 'cotrain:session:' .. save.session .. ':samplers', save.name)
    redis.call('SADD', 'cotrain:weights:' .. ref .. ':users', 's:' .. save.name)
  end
end

local function owe_weights(ref, save)
  redis.call('HSET', 'cotrain:weights:' .. ref, 'record', save.weights, 'worker', save.worker,
    'digest', '', 'size', 0)
  redis.call('SADD', prefix .. 'weights', ref)
  redis.call('SADD', prefix .. 'unstored:' .. save.worker, ref)
  if save.folder then
    redis.call('SADD', prefix .. 'external', save.folder)
  end
end

-- Write what a save leaves; return its result as far as it is known by now.
local function write_save(ref, seq, save, result, ttl_ms)
  if save.kind == 's' then
    add_sampler(ref, save)
  elseif reserve(ref, seq, save, result, ttl_ms) then
    result = nil
  else
    return save.collision
  end
  owe_weights(ref, save)
  return result
end

local resolved = {}
for i = FIRST, #ARGV, 10 do
  local run, seq, tenant = ARGV[i], tonumber(ARGV[i + 1]), ARGV[i + 2]
  local log = prefix .. 'log:' .. run
  local row = redis.call('HMGET', log, 'done', 'numerics')
  if seq == tonumber(row[1]) + 1 then
    local request = run .. ':' .. ARGV[i + 1]
    local result, ttl_ms = ARGV[i + 6], ARGV[i + 5]
    if saves[request] then
      result = write_save(request, ARGV[i + 1], saves[request], result, ttl_ms)
    end
    if result then
      if put_result(request, result, ttl_ms) then
        note_unread(tenant, request, ARGV[i + 9], ttl_ms)
      end
      resolved[#resolved + 1] = request
    end
    redis.call('HSET', log, 'done', seq, 'numerics', (row[2] or numerics) == numerics and numerics or 'mixed')
    local queue = prefix .. 'queue:' .. tenant
    redis.call('HINCRBY', queue, 'ops', -1)
    redis.call('HINCRBY', queue, 'tokens', 0 - tonumber(ARGV[i + 3]))
    redis.call('HINCRBY', queue, 'bytes', 0 - tonumber(ARGV[i + 4]))
    -- An op without effect on the state keeps its place in the log, not its body.
    if ARGV[i + 7] == 'inline' then
      redis.call('HDEL', prefix .. 'bodies:' .. run, seq)
    elseif ARGV[i + 7] ~= '' and redis.call('HINCRBY', refs, ARGV[i + 7], -1) <= 0 then
      redis.call('HDEL', refs, ARGV[i + 7])
    end
    if ARGV[i + 8] ~= '' then
      redis.call('HSET', prefix .. 'ops:' .. run, seq, ARGV[i + 8])
    end
  end
end
redis.call('HDEL', open, cycle)
redis.call('HDEL', starts, cycle)
for _, part in ipairs(redis.call('HKEYS', deaths)) do
  if done[string.match(part, '^([^.]*):%d+')] then
    redis.call('HDEL', deaths, part)
  end
end
for name, value in pairs(totals) do
  redis.call('HINCRBYFLOAT', counters, name, value)
end
for usage, fields in pairs(amounts) do
  for field, amount in pairs(fields) do
    add_usage(usage, field, amount, usage_ttl_s)
  end
end
redis.call('LPUSH', cycles, record)
redis.call('LTRIM', cycles, 0, keep - 1)
redis.call('PUBLISH', notify, table.concat(resolved, '\n'))
redis.call('PUBLISH', wake, 'free')
return 'OK'
