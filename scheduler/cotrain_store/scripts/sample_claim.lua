-- sample_claim: claim waiting sample requests for a worker, round robin over tenants. A tenant may have at most
-- `max_of_tenant` requests waiting at the worker, including those that `waiting` counts there.
-- Fenced by the worker's epoch. Requests that only this worker can run come first, then those that any worker can
-- run. Last come requests for a lost worker whose weights are stored, so that any worker can run them.
-- Paused tenants are skipped.
-- Each row includes the current weight of the tenant, which the decoder applies.
-- A repeated token means that the answer to a claim was lost, so the same answer is returned.
-- needs: fence
local prefix, me, any_worker, token = args.prefix, args.worker, args.any_worker, args.token
local ring, last_claim = prefix .. 'sample_ring', prefix .. 'last_claim:' .. me


local function rows_of(requests)
  local rows = {}
  for i, request in ipairs(requests) do
    rows[i] = redis.call('HMGET', 'cotrain:sample:' .. request,
      'tenant', 'sampler', 'weights', 'ref', 'body', 'at', 'starts', 'deaths', 'trace')
    local weight = redis.call('HGET', 'cotrain:tenants:weights', rows[i][1] or '')
    table.insert(rows[i], 1, request)
    table.insert(rows[i], weight or '')
  end
  return rows
end

local before = redis.call('LRANGE', last_claim, 0, -1)
if table.remove(before, 1) == token then
  return rows_of(before)
end

local dead = {}
for _, worker in ipairs(redis.call('SMEMBERS', prefix .. 'workers')) do
  if worker ~= me and redis.call('EXISTS', prefix .. 'worker:' .. worker) == 0 then
    dead[#dead + 1] = worker
  end
end

local function next_of(tenant)
  for _, queue in ipairs({ me, any_worker }) do
    local request = redis.call('LPOP', prefix .. 'waiting:' .. queue .. ':' .. tenant)
    if request then
      return request
    end
  end
  for _, queue in ipairs(dead) do
    local waiting = prefix .. 'waiting:' .. queue .. ':' .. tenant
    local request = redis.call('LINDEX', waiting, 0)
    local weights = request and redis.call('HGET', 'cotrain:sample:' .. request, 'weights')
    if request and redis.call('HGET', 'cotrain:weights:' .. weights, 'digest') ~= '' then
      return redis.call('LPOP', waiting)
    end
  end
end

local requests, waiting = {}, args.waiting
local has_pauses = redis.call('EXISTS', 'cotrain:tenants:paused') == 1

local function is_paused(tenant)
  return has_pauses and redis.call('HEXISTS', 'cotrain:tenants:paused', tenant) == 1
end

local tenants, at = redis.call('LRANGE', ring, 0, -1), 1
while #requests < args.most and at <= #tenants do
  local tenant = tenants[at]
  local has = waiting[tenant] or 0
  local request = has < args.max_of_tenant and not is_paused(tenant) and next_of(tenant)
  if request then
    local load = prefix .. 'samples:' .. tenant
    waiting[tenant] = has + 1
    redis.call('LREM', ring, 1, tenant)
    if redis.call('HINCRBY', load, 'waiting', -1) > 0 then
      redis.call('RPUSH', ring, tenant) -- a served tenant moves to the end; a skipped one stays
      tenants[#tenants + 1] = tenant
    end
    redis.call('HINCRBY', load, 'running', 1)
    redis.call('RPUSH', prefix .. 'claimed:' .. me, request)
    redis.call('HSET', 'cotrain:sample:' .. request, 'state', 'claimed', 'holder', me)
    requests[#requests + 1] = request
  end
  at = at + 1
end
if #requests > 0 then
  redis.call('DEL', last_claim)
  redis.call('RPUSH', last_claim, token)
  for _, request in ipairs(requests) do
    redis.call('RPUSH', last_claim, request)
  end
end
return rows_of(requests)
