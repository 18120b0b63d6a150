-- commit: make a step's effects visible: its results, `done`, and the end of its cycle, at once.
-- Fenced by the worker's epoch; an op counts only as the next one of its run. Twice is harmless.
-- (`0 - n`, not `-n`: Lua writes minus zero as '-0', which Redis does not take for an integer.)
local epoch_key, open, cycles, refs = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local notify, wake, counters = KEYS[5], KEYS[6], KEYS[7]
local starts, deaths = KEYS[8], KEYS[9]
local epoch, prefix, cycle, record, keep = ARGV[1], ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5])
local counted, numerics, saved = ARGV[6], ARGV[7], ARGV[8]
local FIRST = 9 -- then, for each op: run, seq, tenant, tokens, size, ttl ms, result, what to release
                -- ('inline', a segment or ''), and what to keep of its envelope instead ('' for all)

if redis.call('GET', epoch_key) ~= epoch then
  return 'FENCED'
end
if redis.call('HEXISTS', open, cycle) == 0 then
  return 'DONE'
end
local totals, saves = cjson.decode(counted), cjson.decode(saved) -- before anything is written: a script that fails undoes nothing
local done = {}
for i = FIRST, #ARGV, 9 do
  local run, seq = ARGV[i], tonumber(ARGV[i + 1])
  done[run] = done[run] or tonumber(redis.call('HGET', prefix .. 'log:' .. run, 'done'))
  if seq > done[run] + 1 then
    return 'ORDER'
  end
  done[run] = math.max(done[run], seq)
end

-- The request names the weights; what refers to them is a sampler ('s') or a checkpoint ('c').
local function write_save(ref, save)
  redis.call('HSET', 'cotrain:weights:' .. ref, 'record', save.weights, 'worker', save.worker,
    'digest', '', 'size', 0)
  redis.call('SADD', prefix .. 'weights', ref)
  redis.call('SADD', prefix .. 'unstored:' .. save.worker, ref)
  local users = 'cotrain:weights:' .. ref .. ':users'
  if save.kind == 'c' then
    local checkpoint = 'cotrain:checkpoint:' .. save.name
    redis.call('SET', checkpoint, save.user)
    if save.expires_at_ms then
      redis.call('PEXPIREAT', checkpoint, save.expires_at_ms)
    end
    redis.call('SADD', users, 'c:' .. save.name)
  elseif redis.call('SET', 'cotrain:sampler:' .. save.name, save.user, 'NX', 'PX', save.idle_ms) then
    redis.call('SADD', 'cotrain:session:' .. save.session .. ':samplers', save.name)
    redis.call('SADD', users, 's:' .. save.name)
  end
end

local resolved = {}
for i = FIRST, #ARGV, 9 do
  local run, seq, tenant = ARGV[i], tonumber(ARGV[i + 1]), ARGV[i + 2]
  local log = prefix .. 'log:' .. run
  local row = redis.call('HMGET', log, 'done', 'numerics')
  if seq == tonumber(row[1]) + 1 then
    local request = run .. ':' .. ARGV[i + 1]
    redis.call('SET', 'cotrain:result:' .. request, ARGV[i + 6], 'NX', 'PX', ARGV[i + 5])
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
    if saves[request] then
      write_save(request, saves[request])
    end
    resolved[#resolved + 1] = request
  end
end
redis.call('HDEL', open, cycle)
redis.call('HDEL', starts, cycle)
redis.call('DEL', deaths)
for name, value in pairs(totals) do
  redis.call('HINCRBYFLOAT', counters, name, value)
end
redis.call('LPUSH', cycles, record)
redis.call('LTRIM', cycles, 0, keep - 1)
redis.call('PUBLISH', notify, table.concat(resolved, '\n'))
redis.call('PUBLISH', wake, 'free')
return 'OK'
